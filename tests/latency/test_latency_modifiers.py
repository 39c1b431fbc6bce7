"""Slow workers, pauses and spells do what they say, and stack."""

import math

import pytest

from quorate.latency import Constant, Pauses, Slow, Spells, parse_latency


def test_a_slow_worker_takes_its_factor_longer_and_the_others_do_not() -> None:
    plain = parse_latency("shifted-exp:0.05,0.025").sampler(1, 6)
    slow = parse_latency("shifted-exp:0.05,0.025*slow:3=4,5=1.5").sampler(1, 6)
    for worker, factor in enumerate([1, 1, 1, 4, 1, 1.5]):
        assert slow(worker, 8, 2, 0.0) == plain(worker, 8, 2, 0.0) * factor


def test_pauses_hit_their_share_and_stack_independently() -> None:
    model = Pauses(Pauses(Constant(1.0), 0.2, 2.0), 0.2, 3.0)
    draw = model.sampler(3, 10)
    times = [draw(worker, step, 0, 0.0) for worker in range(10) for step in range(5000)]
    # Standard errors: 0.0009 for the pair, 0.0016 for the single ones.
    assert times.count(6.0) / len(times) == pytest.approx(0.04, abs=0.004)
    assert times.count(2.0) / len(times) == pytest.approx(0.16, abs=0.007)
    assert times.count(3.0) / len(times) == pytest.approx(0.16, abs=0.007)


def test_a_spell_is_one_stretch_of_its_length_in_every_window() -> None:
    every_s, length_s, grid = 10.0, 2.0, 1000
    draw = Spells(Constant(1.0), every_s, length_s, 5.0).sampler(4, 3)
    begins = set()
    for window in range(30):
        times_s = [(window + i / grid) * every_s for i in range(grid)]
        hit = [i for i, time_s in enumerate(times_s) if draw(0, 0, 0, time_s) == 5.0]
        assert hit[-1] - hit[0] == len(hit) - 1, "one stretch"
        assert len(hit) / grid == pytest.approx(length_s / every_s, abs=2 / grid)
        assert [draw(2, 9, 9, time_s) == 5.0 for time_s in times_s] == [i in set(hit) for i in range(grid)], (
            "every worker alike"
        )
        begins.add(hit[0])
    assert len(begins) > 20
    assert min(begins) < 0.2 * grid < 0.6 * grid < max(begins) <= 0.8 * grid


def test_a_spell_hits_a_share_of_the_workers_anew_each_time() -> None:
    workers, windows = 16, 400
    draw = Spells(Constant(1.0), 10.0, 10.0, 5.0, share=0.25).sampler(5, workers)
    hits = [[draw(worker, 0, 0, 10.0 * window + 3.0) == 5.0 for worker in range(workers)] for window in range(windows)]
    assert sum(map(sum, hits)) / (workers * windows) == pytest.approx(0.25, abs=0.02)
    assert {sum(column) > 0.15 * windows for column in zip(*hits, strict=True)} == {True}
    # A worker that is hit stays so until the spell ends.
    assert hits == [
        [draw(worker, 7, 7, 10.0 * window + 9.5) == 5.0 for worker in range(workers)] for window in range(windows)
    ]


def test_a_spell_as_long_as_its_window_never_ends() -> None:
    draw = Spells(Constant(1.0), 10.0, 10.0, 2.0).sampler(0, 1)
    assert {draw(0, 0, 0, time_s / 7) for time_s in range(1000)} == {2.0}


def test_stacked_spells_fall_at_different_times() -> None:
    draw = Spells(Spells(Constant(1.0), 10.0, 1.0, 2.0), 10.0, 1.0, 3.0).sampler(6, 1)
    times = [draw(0, 0, 0, i / 50) for i in range(50 * 10 * 40)]
    # Placed alike, all hit tickets would be hit twice; placed at random, about a tenth are.
    assert times.count(6.0) < 0.3 * times.count(2.0)


def test_a_modifier_passes_step_row_and_time_on() -> None:
    inner = parse_latency("chen2016*spells:10,1,3*pauses:0.5,2")
    outer = Slow(inner, {1: 2.0})
    a, b = inner.sampler(8, 2), outer.sampler(8, 2)
    calls = [(1, step, row, time_s / 3) for step in range(5) for row in range(5) for time_s in range(40)]
    assert [b(*call) for call in calls] == [2.0 * a(*call) for call in calls]
    assert math.isfinite(outer.longest())
    assert max(b(*call) for call in calls) <= outer.longest()
