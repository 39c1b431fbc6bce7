"""The study of Inception: in seconds from end to end, and what it runs next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from experiments.common.command import main
from experiments.common.curves import Point
from experiments.inception import results
from experiments.inception.__main__ import EXPERIMENT
from experiments.inception.settings import FULL, Trial, configurations, grid, tuning_of, wanted
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
        found[replace(last, **odd)] = _found(0.99)
    assert results.rates(found)["async 212"] == 0.0016


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
