"""The study of Inception: in seconds from end to end, and what it runs next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from experiments.common.command import main
from experiments.common.curves import Point
from experiments.inception import results, tables
from experiments.inception.__main__ import EXPERIMENT
from experiments.inception.settings import FULL, Trial, configurations, grid, tuning_of, wanted
from experiments.inception.timing import Seconds, Split, seconds_a_round
from experiments.inception.training import learning, train
from experiments.published import CHEN


@pytest.mark.experiments
def test_quick_runs_from_the_trials_to_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    assert "complete" in capsys.readouterr().out
    drawn = {"curves.png", "tuning.png", "early.png", "grid.png", "summary.md"}
    assert {file.name for file in tmp_path.iterdir()} == {"curves.csv", "rounds.csv", *drawn}
    assert "async 53" in (tmp_path / "summary.md").read_text()


def _found(accuracy: float) -> list[Point]:
    return [Point(1, 1.0, 1, accuracy, 1.0)]


def test_the_paper_has_the_same_configurations() -> None:
    assert {one.name for one in configurations()} == set(CHEN["fig8"])
    assert sorted(one.workers for one in configurations()) == [53, 53, 106, 106, 212, 212]


def _tuned() -> dict[Trial, list[Point]]:
    """As if the tuning had been run, and the middle rates were best."""
    return {trial: _found(0.5 if trial.lr == _middle(trial) else 0.4) for trial in wanted({}, FULL)}


def _middle(trial: Trial) -> float:
    one = replace(trial, lr=0.0, seed=0, epochs=0)
    return tuning_of(one, {}, FULL)[0][FULL.first_rates // 2].lr


def _usual(found: dict[Trial, list[Point]]) -> list[Trial]:
    """The six configurations in full."""
    return [
        trial
        for trial in wanted(found, FULL)
        if trial.is_usual and not trial.is_tuning and trial.epochs == FULL.epochs and trial.name in CHEN["fig8"]
    ]


def test_first_rates_are_tried_then_the_best_is_trained_with_every_seed() -> None:
    tried = list(wanted({}, FULL))
    assert all(trial.is_tuning for trial in tried) and len(tried) == 6 * FULL.first_rates
    finals = _usual(_tuned())
    assert {(trial.name, trial.seed) for trial in finals} == {
        (name, seed) for name in CHEN["fig8"] for seed in FULL.seeds
    }
    rates = {trial.lr / _middle(trial) for trial in finals if trial.name == "sync 100+6"}
    assert rates == {0.25, 0.5, 1.0, 2.0}
    one_rate = {trial.name for trial in finals if trial.lr != _middle(trial)}
    assert one_rate == {"sync 100+6", "async 106", "async 212"}


def test_async_has_four_rates_in_full_and_one_more_where_the_best_is_at_the_edge() -> None:
    found = _tuned()
    rates = {trial.lr for trial in _usual(found) if trial.name == "async 212"}
    assert rates == {0.0008, 0.0016, 0.0032, 0.0064}
    for trial in _usual(found):
        found[trial] = _found(0.6 if trial.lr == 0.0064 else 0.5)
    assert {trial.lr for trial in _usual(found) if trial.name == "async 212"} == {*rates, 0.0128}


def test_the_best_async_rate_and_no_other_is_clipped_to_other_norms() -> None:
    found = _tuned()
    for trial in _usual(found):
        found[trial] = _found(0.6 if trial.lr == 0.0032 else 0.5)
    clipped = {trial for trial in wanted(found, FULL) if trial.clip not in (0.0, 2.0)}
    assert {(trial.name, trial.lr, trial.clip, trial.seed) for trial in clipped} == {
        ("async 212", 0.0032, clip, seed) for clip in (1.0, 4.0) for seed in FULL.seeds
    }


def test_a_training_is_chosen_by_its_mean_and_not_before_it_has_every_seed() -> None:
    found = _tuned()
    for trial in _usual(found):
        found[trial] = _found({0.0016: 0.55, 0.0032: 0.6}.get(trial.lr, 0.5))
    last = next(trial for trial in found if (trial.name, trial.lr, trial.seed) == ("async 212", 0.0032, 3))
    assert results.rates(found)["async 212"] == 0.0032
    assert len(results.finals(found)["async 212"]) == len(FULL.seeds)
    del found[last]
    assert results.rates(found)["async 212"] == 0.0016
    for odd in ({"clip": 1.0}, {"stop": 4}, {"average": 0.0}, {"epochs": 40}):
        assert results.rates({**found, replace(last, **odd): _found(0.99)})["async 212"] == 0.0016, odd


def test_a_grid_has_every_quorum_without_backups_and_with_six_and_the_largest_with_every_number() -> None:
    splits = [(one.quorum, one.backups) for one in grid(FULL)]
    assert len(splits) == len(set(splits))
    assert set(splits) == {(n, b) for n in (50, 70, 80, 90, 100) for b in (0, 6)} | {(100, 3), (100, 12)}


def test_a_training_that_stops_early_has_the_schedule_of_a_whole_one() -> None:
    whole, stopped = (train(Trial("sync", 12, 0, 0.1, 1, 2, stop=stop), quick=True) for stop in (0, 1))
    assert stopped[-1] == whole[0] and whole[-1].update == 2 * stopped[-1].update
    assert [point.update for point in stopped] == [4, 6]


def test_the_average_looks_back_as_many_samples_whatever_an_update_takes() -> None:
    one, many = (learning(Trial("sync", quorum, 0, 0.1, 1, 1), 16 * quorum, 50_000)["ema"] for quorum in (1, 100))
    assert one is not None and many is not None
    assert (1 - many) == pytest.approx(100 * (1 - one))


def test_without_an_average_the_last_parameters_are_measured() -> None:
    assert learning(Trial("sync", 100, 6, 0.1, 1, 1, average=0.0), 1600, 50_000)["ema"] is None


def _straight(trial: Trial, updates: float) -> list[Point]:
    """A training that is at 60 % after so many updates."""
    return [Point(0, 0.0, 0, 0.0, 1.0), Point(round(2 * updates), 2.0, 0, 1.2, 1.0)]


def _grid_with(power: float) -> dict[Trial, list[Point]]:
    """Seeds differ by a factor, which is no matter of the exponent."""
    found = {}
    for one in grid(FULL):
        for seed in FULL.seeds:
            trial = replace(one, seed=seed)
            found[trial] = _straight(trial, 1e6 * seed * one.quorum**power)
    return found


def test_the_exponent_is_fitted_seed_by_seed_over_all_quorums() -> None:
    spread = results.grid_exponent(_grid_with(-0.85), 6, 0.6)
    assert spread is not None and spread.seeds == 3
    assert spread.mean == pytest.approx(-0.85, abs=1e-3) and spread.half_width < 1e-3
    assert results.exponent([8.0, 4.0, 4.0, 2.0], [1, 2, 2, 4]) == pytest.approx(-1.0)


def test_there_is_no_exponent_while_a_seed_of_a_split_is_missing_or_does_not_get_there() -> None:
    found = _grid_with(-0.85)
    middle = next(trial for trial in found if (trial.quorum, trial.backups, trial.seed) == (80, 0, 2))
    points = found.pop(middle)
    assert results.grid_exponent(found, 0, 0.6) is None and results.grid_exponent(found, 6, 0.6) is not None
    found[middle] = points[:1]
    assert results.grid_exponent(found, 0, 0.6) is None
    assert tables.updates(found).count("not in all seeds") == len(tables.TARGETS)


def test_what_was_not_run_is_a_dash() -> None:
    found = _tuned()
    assert tables.updates(found).count("–") == len(tables.TARGETS) * (len(FULL.grid) + 2)
    assert "| – |" in tables.full_rates(found) and "| – |" in tables.long(found)
    rounds = {Split(50, 3, seed, 10): [Seconds(1.0 + seed)] for seed in (1, 2, 3)}
    assert "3.00 ± " in tables.splits(found, rounds)


def test_a_training_with_seeds_missing_says_so() -> None:
    found = _tuned()
    for trial in _usual(found):
        if trial.name == "async 106" and (trial.lr, trial.seed) != (0.0016, 2):
            found[trial] = _found(0.5)
    assert "(2 of 3 seeds)" in tables.full_rates(found)


def test_the_early_curves_are_apart_from_others_and_by_what_is_measured() -> None:
    found = _tuned()
    for trial in wanted(_tuned(), FULL):
        found.setdefault(trial, _found(0.3 if trial.average else 0.2))
    with_average, without = (results.early(found, 100, average) for average in (0.5, 0.0))
    assert list(with_average) == list(without) and len(with_average) == 4
    assert {points[-1].measure for curves in with_average.values() for points in curves} == {0.3}
    assert {points[-1].measure for curves in without.values() for points in curves} == {0.2}
    assert all(len(curves) == len(FULL.early_seeds) for curves in without.values())


def test_seconds_a_round_are_those_of_a_training() -> None:
    """Compared before the end of the epoch, where batches run out."""
    trained = train(Trial("sync", 3, 1, 0.1, seed=5, epochs=1, stop=1), quick=True)[0]
    (timed,) = seconds_a_round(Split(3, 1, seed=5, rounds=trained.update))
    assert timed.seconds == pytest.approx(trained.seconds / trained.update, rel=1e-6)
