"""The recommendation: against the paper, in its limits, and what it says when it cannot decide."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quorate
from quorate.errors import BadInput
from quorate.latency import Lognormal, Pareto, ShiftedExponential
from quorate.network import parse_network
from quorate.planning import plan
from quorate.planning.censoring import find_regimes
from quorate.planning.fits import fit_laws
from quorate.planning.plan import find_slow
from quorate.planning.scenarios import on_network, resize
from quorate.planning.world import Floats, World, effort_of_iterations
from tests.planning.worlds import exponential, record, world

PAPER = "50:137.5,70:99.8,80:91.1,90:82.5,100:76.2"


def test_the_papers_own_measurement_gives_the_papers_choice() -> None:
    made = plan(latency="chen2016", machines=100, iterations=PAPER)
    found = made.recommendation
    assert abs(found.quorum - 96) <= 1 and found.quorum + found.backups == 100
    assert found.time / 3600 == pytest.approx(38.05, rel=0.01)
    assert made.splits[-1].time / 3600 == pytest.approx(55.5, rel=0.01)
    assert found.speedup == pytest.approx(1.46, abs=0.01)


def test_json_has_what_is_promised(tmp_path: Path) -> None:
    made = plan(record(tmp_path / "run", "shifted-exp:0.05,0.02", 4, 0, 100), model_bytes=1000)
    found = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert set(found["recommendation"]) >= {
        "policy", "quorum", "backups", "seconds_per_update", "time", "speedup", "reason"
    }  # fmt: skip
    assert len(found["splits"]) == 4
    assert set(found["splits"][0]) == {"quorum", "backups", "update_seconds", "updates", "time", "wasted", "bytes"}
    assert set(found["splits"][0]["update_seconds"]) == {"mean", "low", "high", "median", "p99"}
    assert [split["quorum"] for split in found["splits"]] == [1, 2, 3, 4]
    assert [split["bytes"] for split in found["splits"]] == [5000, 6000, 7000, 8000]
    assert {one["policy"] for one in found["others"]} == {"async", "softsync", "k-batch", "deadline"}


@given(st.floats(0.0, 1e6), st.integers(2, 16))
def test_more_noise_never_asks_for_a_smaller_quorum(noise: float, workers: int) -> None:
    from quorate.planning.recommendation import recommend
    from quorate.planning.splits import split_times
    from quorate.planning.world import effort_of_noise, effort_unknown

    times = split_times(world(exponential(100, workers)), "cancel")
    some = recommend(times, effort_of_noise(noise, 32, "given"), workers).quorum
    more = recommend(times, effort_of_noise(2 * noise + 1, 32, "given"), workers).quorum
    assert some <= more <= recommend(times, effort_unknown(), workers).quorum


def test_without_noise_one_gradient_is_enough() -> None:
    found = plan(latency="shifted-exp:0.05,0.05", machines=8, noise_scale=0, batch_size=32).recommendation
    assert found.quorum == 1


def test_the_noise_scale_of_the_run_is_used(tmp_path: Path) -> None:
    engine = quorate.Simulated(4, "shifted-exp:0.05,0.02")
    quorate.train("digits", quorate.FullSync(), engine, updates=60, out=tmp_path / "run")
    assert "measured during the run" in plan(tmp_path / "run").effort.sentence
    assert "given" in plan(tmp_path / "run", noise_scale=100.0).effort.sentence


def test_unknown_noise_is_said() -> None:
    assert "noise-dominated" in plan(latency="constant:1", machines=2).effort.sentence


@pytest.mark.parametrize(("alpha", "least"), [(1.0, 1), (0.5, 2), (0.3, 3)])
def test_a_mean_that_does_not_exist_is_answered_with_the_backups_it_takes(alpha: float, least: int) -> None:
    for text in (f"pareto:0.05,{alpha}", f"pareto:0.05,{alpha}*slow:1=1.5"):
        made = plan(latency=text, machines=8)
        means = [split["update_seconds"]["mean"] for split in made.as_dict()["splits"]]
        assert [mean is None for mean in means] == [8 - quorum < least for quorum in range(1, 9)]
        assert any(f"b={least} backups" in note for note in made.notes)
        assert made.recommendation.backups >= least and made.recommendation.speedup is None


def test_a_mean_that_does_not_exist_stays_so_whatever_is_changed() -> None:
    changes = ["without=3", "bandwidth=1Gbps", "machines=5"]
    for _, other in plan(latency="pareto:0.05,0.8", machines=8, model_bytes=1000, what_if=changes).what_if:
        assert [math.isinf(split.mean) for split in other.splits] == [False] * (other.machines - 1) + [True]
        assert any("b=1 backups" in note for note in other.notes)


def test_a_mean_that_no_split_has_is_refused_with_what_it_takes() -> None:
    with pytest.raises(BadInput, match=r"from b=10 backups on, which takes 11 machines or more"):
        plan(latency="pareto:0.05,0.1", machines=4)
    with pytest.raises(BadInput, match="cancel late work"):  # stuck workers add up, whatever the split
        plan(latency="pareto:0.05,0.8", machines=8, late="finish")


# ---------------------------------------------------------------- the sentence


def test_the_reason_reads_well_at_its_ends() -> None:
    same = plan(latency="constant:1", machines=4).recommendation.reason
    assert "takes no longer an update" in same
    (first, *_) = plan(latency="shifted-exp:1,0.5", machines=8, noise_scale=0, batch_size=1).recommendation.changes
    assert "if the noise scale were above" in first
    rising = plan(latency="shifted-exp:1,0.5", machines=8, iterations="4:100,8:300").recommendation.reason
    assert "saves" in rising and "-" not in rising


# ---------------------------------------------------------------- updates


def test_updates_beyond_those_given_are_said_to_be_an_extrapolation() -> None:
    made = plan(latency="lognormal:1,1", machines=16, iterations="12:100,16:90")
    assert made.recommendation.quorum < 12 and any("12 to 16" in note for note in made.notes)
    assert not plan(latency="chen2016", machines=100, iterations=PAPER).notes


def test_a_steep_line_does_not_leave_the_range_of_numbers() -> None:
    assert np.isfinite(effort_of_iterations("1:1,2:1e300").updates(np.array([1.0, 100.0]))).all()


def test_iterations_are_a_straight_line_in_log_and_log() -> None:
    effort = effort_of_iterations("10:100,40:50")  # N^-1/2, in thousands
    assert effort.updates(np.array([10.0, 20.0, 40.0, 90.0, 2.5])) == pytest.approx(
        [100_000, 70_711, 50_000, 100_000 / 3, 200_000], rel=1e-4
    )


@pytest.mark.parametrize("text", ["", "50", "50:", "50:0", "0:5,1:2", "50:1,50:2", "50:1", "a:b,1:2", "50:-1,60:2"])
def test_bad_iterations(text: str) -> None:
    with pytest.raises(BadInput, match="iterations"):
        effort_of_iterations(text)


# ---------------------------------------------------------------- who is always slow


def test_who_is_always_slow_is_named_with_what_helps(tmp_path: Path) -> None:
    made = plan(record(tmp_path / "run", "shifted-exp:0.05,0.01*slow:3=4", 8, 0, 400))
    (slow,) = made.slow
    assert slow.worker == 3 and slow.factor == pytest.approx(3.9, rel=0.05)
    assert slow.gain_removed is not None and slow.gain_removed >= -0.01  # a backup hides it, and no more
    assert slow.gain_less_work is not None and slow.gain_less_work > 0.01
    assert "worker 3 is always slow" in slow.sentence() and "removing it" in slow.sentence()


@pytest.mark.parametrize("latency", ["pareto:0.05,1.2", "pause:0.05,0.1,10", "lognormal:0.05,1", "chen2016"])
def test_chance_is_not_taken_for_a_slow_worker(latency: str, tmp_path: Path) -> None:
    assert not plan(record(tmp_path / "run", latency, 8, 0, 300)).slow


def test_half_a_cluster_is_not_slow_beside_the_other() -> None:
    seconds = exponential(200, 4)
    seconds[:, 2:] *= 3
    assert find_slow(world(seconds), lambda *_: 1.0) == []


def test_of_many_slow_workers_the_gain_is_worked_out_for_the_slowest() -> None:
    seconds = exponential(200, 20)
    seconds[:, :7] *= np.linspace(2, 5, 7)
    asked: list[int] = []

    def best_time(world: World, _: Floats) -> float:
        asked.append(world.machines)
        return 1.0

    found = find_slow(world(seconds), best_time)
    assert [slow.worker for slow in found] == [6, 5, 4, 3, 2, 1, 0] and len(asked) == 11
    assert [slow.gain_removed is None for slow in found] == [False] * 5 + [True] * 2


# ---------------------------------------------------------------- spells and fits


@settings(max_examples=25)
@given(st.integers(0, 1000))
def test_chance_is_not_taken_for_spells(seed: int) -> None:
    random = np.random.default_rng(seed)
    assert len(find_regimes(random.lognormal(0, 0.5, (300, 8)))) == 1


def test_spells_are_found_where_they_are() -> None:
    seconds = exponential(300, 8, 1.0, 0.2)
    seconds[100:130] *= 3
    assert [regime.start for regime in find_regimes(seconds)] == [0, 100, 130]


@pytest.mark.parametrize("law", [ShiftedExponential(1.0, 0.5), Lognormal(1.0, 0.4), Pareto(1.0, 2.0)])
def test_a_law_is_found_again(law: ShiftedExponential | Lognormal | Pareto) -> None:
    levels = np.random.default_rng(0).random(4000)
    fits = fit_laws(np.array([law.quantile(float(level)) for level in levels]).reshape(-1, 8))
    assert type(fits[0].law) is type(law) and fits[0].distance < 0.03
    assert all(fitted == pytest.approx(law.quantile(level), rel=0.1) for level, _, fitted in fits[0].points[:8])


def test_more_machines_than_measured_come_from_a_fit_and_say_so() -> None:
    bigger = resize(world(exponential(3000, 8)), 16)
    assert bigger.machines == 16 and "an extrapolation" in bigger.notes[-1] and "shifted-exp" in bigger.notes[-1]
    truth = np.sort(exponential(3000, 16, seed=1), axis=1).mean(axis=0)
    assert np.sort(bigger.seconds, axis=1).mean(axis=0) == pytest.approx(truth, rel=0.03)
    smaller = resize(world(exponential(3000, 8)), 4)
    truth = np.sort(exponential(3000, 4, seed=1), axis=1).mean(axis=0)
    assert np.sort(smaller.seconds, axis=1).mean(axis=0) == pytest.approx(truth, rel=0.03)


# ---------------------------------------------------------------- what if


def test_another_network_is_as_the_simulator_has_it() -> None:
    network = "bandwidth=80Mbps,latency=2ms,server=800Mbps"
    seconds = exponential(300, 6, 0.05, 0.02)
    linked = on_network(world(seconds, model_bytes=100_000), parse_network(network))
    times = np.sort(linked.seconds, axis=1)
    engine = quorate.Simulated(6, "constant:0.05", network=network, model_bytes=100_000)
    even = on_network(world(np.full((50, 6), 0.05), model_bytes=100_000), parse_network(network)).seconds
    result = quorate.train(None, quorate.FullSync(), engine, updates=20)
    assert even.max() == pytest.approx(result.metrics.seconds / 20, rel=1e-9)
    assert (times[:, 0] > seconds.min(axis=1) + 2 * (0.01 + 0.002) - 1e-12).all()


def test_what_if(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "shifted-exp:0.05,0.01*slow:3=4", 8, 0, 200)
    changes = ["machines=12", "without=3", "machines=4", "bandwidth=1Gbps"]
    made = plan(run, what_if=changes, model_bytes=1_000_000)
    by_text = dict(made.what_if)
    assert list(by_text) == changes
    assert [by_text[change].machines for change in changes] == [12, 7, 4, 8]
    assert not by_text["without=3"].slow
    assert by_text["bandwidth=1Gbps"].splits[0].mean == pytest.approx(made.splits[0].mean + 0.016, rel=0.02)


@pytest.mark.parametrize(
    "text", ["", "machines", "machines=0", "machines=-1", "machines=x", "without=99", "speed=3", "bandwidth=fast"]
)
def test_bad_what_ifs(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        plan(latency="constant:1", machines=4, model_bytes=1, what_if=[text])


def test_without_one_of_the_machines_asked_for(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "shifted-exp:0.05,0.01*slow:3=4", 8, 0, 100)
    assert [plan(run, machines=size, what_if=["without=3"]).what_if[0][1].machines for size in (4, 8, 12)] == [3, 7, 11]
    with pytest.raises(BadInput, match="leaves no machine"):
        plan(run, machines=1, what_if=["without=3"])


def test_a_bandwidth_needs_a_size() -> None:
    with pytest.raises(BadInput, match="model-bytes"):
        plan(latency="constant:1", machines=4, what_if=["bandwidth=1Gbps"])


# ---------------------------------------------------------------- bad input


def test_too_few_rounds_says_how_many_are_needed(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "pause:0.05,0.05,10", 8, 0, 6)
    with pytest.raises(BadInput, match=r"has 6 whole rounds, too few to decide; about \d+ are needed"):
        plan(run)


def test_a_wide_interval_is_noted_with_the_rounds_it_would_take(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "pareto:0.05,1.1", 4, 0, 40)
    note = next(note for note in plan(run, interval=0.001).notes if "wider" in note)
    assert "has 40 rounds" in note
    assert not any("wider" in note for note in plan(run, interval=0.9).notes)


def test_a_torn_trace_is_used_as_far_as_it_is_whole(tmp_path: Path) -> None:
    trace = record(tmp_path / "run", "shifted-exp:0.05,0.02", 4, 0, 100) / "trace.jsonl"
    text = trace.read_text()
    trace.write_text(text[: int(len(text) * 0.6)])
    made = plan(trace)
    assert 40 < made.rounds < 70
    assert any("torn" in note and "left out" in note for note in made.notes)


@pytest.mark.parametrize("schema", [0, 99])
def test_another_schema_is_refused(schema: int, tmp_path: Path) -> None:
    trace = record(tmp_path / "run", "constant:1", 2, 0, 30) / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    header = {**json.loads(lines[0]), "schema": schema}
    trace.write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
    with pytest.raises(BadInput, match=f"schema {schema}"):
        plan(trace)


def test_one_worker_leaves_nothing_to_choose(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="one worker"):
        plan(record(tmp_path / "run", "constant:1", 1, 0, 30))


def test_other_bad_input(tmp_path: Path) -> None:
    for options in (
        {},
        {"latency": "constant:1"},
        {"latency": "constant:1", "machines": 0},
        {"latency": "constant:1", "machines": 4, "noise_scale": 100.0},  # of how many samples a batch?
        {"latency": "constant:1", "machines": 4, "noise_scale": -1.0, "batch_size": 1},
        {"latency": "constant:1", "machines": 4, "noise_scale": math.nan, "batch_size": 1},
        {"latency": "constant:1", "machines": 4, "noise_scale": 1.0, "batch_size": 1, "iterations": PAPER},
        {"latency": "constant:1", "machines": 4, "interval": 0.0},
        {"latency": "constant:1", "machines": 4, "late": "drop"},
        {"latency": "slow:3=4", "machines": 4},
        {"latency": "constant:1*slow:9=4", "machines": 4},
    ):
        with pytest.raises(BadInput):
            plan(**options)  # type: ignore[arg-type]
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(BadInput):
            plan(path)
    run = record(tmp_path / "run", "constant:1", 2, 0, 30)
    with pytest.raises(BadInput, match="one of the two"):
        plan(run, latency="constant:1", machines=2)
    with pytest.raises(BadInput, match="2 traces"):
        plan(run, run)


def test_one_machine_is_planned_too() -> None:
    found = plan(latency="lognormal:1,0.5", machines=1).recommendation
    assert (found.policy, found.quorum, found.backups) == ("full-sync", 1, 0)
