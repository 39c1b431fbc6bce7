"""The study of Inception: in seconds from end to end, and what it runs next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from experiments.common.command import main
from experiments.common.curves import Point
from experiments.inception.__main__ import EXPERIMENT
from experiments.inception.figures import PUBLISHED
from experiments.inception.settings import FULL, Trial, configurations, tuning_of, wanted
from experiments.inception.training import learning


@pytest.mark.experiments
def test_quick_runs_from_the_trials_to_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    assert "complete" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {"curves.csv", "curves.png", "tuning.png", "summary.md"}
    assert "async 53" in (tmp_path / "summary.md").read_text()


def _found(accuracy: float) -> list[Point]:
    return [Point(1, 1.0, 1, accuracy, 1.0)]


def test_the_paper_has_the_same_configurations() -> None:
    assert {one.name for one in configurations()} == set(PUBLISHED)
    assert sorted(one.workers for one in configurations()) == [53, 53, 106, 106, 212, 212]


def test_first_rates_are_tried_then_the_best_is_trained_with_every_seed() -> None:
    found: dict[Trial, list[Point]] = {}
    tried = list(wanted(found, FULL))
    assert all(trial.is_tuning for trial in tried) and len(tried) == 6 * FULL.first_rates
    found = {trial: _found(0.5 if trial.lr == _middle(trial) else 0.4) for trial in tried}
    finals = [trial for trial in wanted(found, FULL) if not trial.is_tuning]
    assert {(trial.name, trial.seed) for trial in finals} == {(name, seed) for name in PUBLISHED for seed in FULL.seeds}
    assert all(trial.epochs == FULL.epochs for trial in finals)
    rates = {trial.lr / _middle(trial) for trial in finals if trial.name == "sync 100+6"}
    assert rates == {0.25, 0.5, 1.0, 2.0}
    assert {trial.lr / _middle(trial) for trial in finals if trial.name != "sync 100+6"} == {1.0}


def _middle(trial: Trial) -> float:
    one = replace(trial, lr=0.0, seed=0, epochs=0)
    return tuning_of(one, {}, FULL)[0][FULL.first_rates // 2].lr


def test_the_average_looks_back_as_many_samples_whatever_an_update_takes() -> None:
    one, many = (learning(Trial("sync", quorum, 0, 0.1, 1, 1), 16 * quorum, 50_000)["ema"] for quorum in (1, 100))
    assert one is not None and many is not None
    assert (1 - many) == pytest.approx(100 * (1 - one))
