"""The study of staleness: in seconds from end to end, and piece by piece."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.common.command import main
from experiments.common.curves import Point
from experiments.common.trials import Table
from experiments.staleness.__main__ import EXPERIMENT
from experiments.staleness.settings import (
    FULL,
    MOST_TRIED,
    PAPERS_EMA,
    PAPERS_LR,
    QUICK,
    STALENESSES,
    Trial,
    final_error,
    trainings_of,
    tuning_of,
    wanted,
)
from experiments.staleness.tables import PAPER, best_method, outcomes, summary
from experiments.staleness.training import policy_of

import quorate


def curve(error: float, loss: float = 0.1, diverged: int = 0) -> list[Point]:
    return [Point(1, 1.0, 1, 0.9, 2.3), Point(2, 2.0, 2, error, loss, diverged)]


def answers(best_rate: dict[int, float]) -> dict[Trial, list[Point]]:
    """All that is wanted, where a rate is the better, the nearer it is to the best one of its staleness."""
    found: dict[Trial, list[Point]] = {}
    while True:
        new = [trial for trial in wanted(found, FULL) if trial not in found]
        if not new:
            return found
        for trial in new:
            away = abs(math.log(trial.lr / best_rate.get(trial.staleness, PAPERS_LR)))
            found[trial] = curve(0.004 + 0.001 * away + 0.0001 * trial.seed, loss=0.1 + away + trial.clip)


@pytest.mark.experiments
def test_quick_runs_from_the_trials_to_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    names = ["staleness.png", "repairs.png", "tuning.png", "summary.md"]
    assert [Path(line).name for line in shown[-4:]] == names
    assert "complete" in shown
    assert all((tmp_path / name).stat().st_size > 300 for name in names)
    found = Table(tmp_path / "curves.csv", Trial, Point).read()
    finals = [points for trial, points in found.items() if not trial.is_tuning]
    assert all(points[-1].update == QUICK.updates(QUICK.epochs, 0) for points in finals)
    assert set(outcomes(found, QUICK)) == {
        *((method, staleness) for method in ("none", "ramp and rate") for staleness in QUICK.stalenesses),
        *((method, 8) for method in ("ramp", "rate", "clip")),
    }


# ---------------------------------------------------------------- what is trained


def test_every_method_is_tuned_with_as_many_trainings_as_any_other() -> None:
    counts = {
        len(tuning_of(staleness, method, {}, FULL)[0])
        for method in ("rate", "ramp and rate", "clip")
        for staleness in STALENESSES
    }
    assert counts == {3}


def test_the_rate_that_was_best_on_held_out_pictures_is_trained_with_every_seed() -> None:
    found = answers({100: 0.0125, 0: 0.2})
    trials = trainings_of(100, "ramp and rate", found, FULL)
    assert trials is not None and [trial.seed for trial in trials] == [1, 2, 3]
    assert {(trial.lr, trial.ramp, trial.clip, trial.epochs) for trial in trials} == {(0.0125, True, 0.0, 25)}
    assert set(trials) <= set(found)
    tried = sorted(trial.lr for trial in tuning_of(100, "ramp and rate", found, FULL)[0])
    assert tried == [0.00625, 0.0125, 0.025, 0.05, 0.1] and len(tried) <= MOST_TRIED
    at_none = trainings_of(0, "ramp and rate", found, FULL)
    assert at_none is not None and {(trial.lr, trial.ramp) for trial in at_none} == {(0.2, False)}


def test_what_is_the_same_training_is_trained_once() -> None:
    """Where the paper's rate is the best, a ramp with a rate of its own is a ramp."""
    found = answers({})
    assert trainings_of(50, "ramp and rate", found, FULL) == trainings_of(50, "ramp", found, FULL)
    assert trainings_of(0, "ramp and rate", found, FULL) == trainings_of(0, "none", found, FULL)


def test_without_results_the_tuning_comes_first_and_nothing_is_guessed() -> None:
    first = list(wanted({}, FULL))
    assert all(trial.is_tuning for trial in first[: 3 * len(STALENESSES)])
    assert trainings_of(50, "ramp and rate", {}, FULL) is None
    assert all(trial.lr == PAPERS_LR for trial in first if not trial.is_tuning)


def test_the_papers_average_is_tried_once_for_every_seed() -> None:
    with_theirs = [trial for trial in answers({}) if trial.ema == PAPERS_EMA]
    assert [(trial.staleness, trial.seed) for trial in with_theirs] == [(0, 1), (0, 2), (0, 3)]


def test_a_training_is_as_long_as_its_epochs() -> None:
    assert FULL.updates(25, 0) == 25 * 469
    assert FULL.updates(5, 10_000) == 5 * 391
    trial = FULL.trial(50, "ramp")
    assert policy_of(trial, 1000).options() == quorate.Delayed(50, warm_up=120).options()
    assert policy_of(replace(trial, ramp=False), 1000).options() == quorate.Delayed(50).options()


# ---------------------------------------------------------------- what came of it


def test_whoever_diverged_guesses_and_is_never_chosen() -> None:
    assert final_error(curve(0.01)) == 0.01
    assert final_error(curve(0.01, diverged=1)) == 0.9
    assert final_error(curve(math.nan)) == 0.9
    found = {FULL.trial(50, "rate", rate): curve(0.01, loss=rate) for rate in (0.05, 0.1)}
    found[FULL.trial(50, "rate", 0.025)] = curve(0.01, loss=0.0001, diverged=1)
    chosen = tuning_of(50, "rate", found, FULL)[1]
    assert chosen is not None and chosen.lr == 0.05


def test_the_tables_have_the_paper_beside_ours() -> None:
    found = answers({125: 0.0125})
    made = outcomes(found, FULL)
    assert made["none", 125].error.mean == pytest.approx(0.0042 + 0.001 * math.log(8))
    assert best_method(made, 125) == "ramp and rate"
    text = summary(found, FULL)
    assert set(PAPER) == set(STALENESSES)
    assert "| 125 | 1.36 | 0.63 ± 0.02 | 0.42 ± 0.02 | 0.0125 | ramp and rate: 0.42 ± 0.02 |" in text
    assert "| ramp and rate | 125 | 0.0125 | 0.1000 | chosen |" in text
    assert "an average with decay 0.9999 has an error of 0.42 ± 0.02 %" in text


def test_errors_of_seeds_that_fail_are_a_range() -> None:
    found = answers({})
    trials = [FULL.trial(10, "none", seed=seed) for seed in FULL.seeds]
    found |= dict(zip(trials, (curve(0.01), curve(0.02), curve(0.5)), strict=True))
    assert "| 10 | 0.36 | 1.00 to 50.00 | " in summary(found, FULL)  # an interval would reach below no error at all
    found[trials[2]] = curve(0.03, diverged=1)
    assert "| 10 | 0.36 | 1.00 to 90.00 (1 of 3 diverged) | " in summary(found, FULL)


def test_a_table_of_half_a_study_says_what_is_missing(tmp_path: Path) -> None:
    trial = FULL.trial(5, "none", seed=1)
    found = {trial: curve(0.0041, diverged=1)}
    assert "| 5 | 0.37 | diverged (1 of 1) | – | – | none: diverged (1 of 1) |" in summary(found, FULL)
    Table(tmp_path / "curves.csv", Trial, Point).append(trial, found[trial])
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 0


def test_without_curves_it_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 2
    assert "there are no results" in capsys.readouterr().err


def test_the_committed_tables_can_be_made_again(tmp_path: Path) -> None:
    committed = EXPERIMENT.results / "curves.csv"
    if not committed.exists():
        pytest.skip("there are no committed results yet")
    (tmp_path / "curves.csv").write_bytes(committed.read_bytes())
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.md").read_text() == (EXPERIMENT.results / "summary.md").read_text()
