"""The study of delay: in seconds from end to end, and piece by piece."""

from __future__ import annotations

import math
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.delay import study as study_module
from experiments.delay import training
from experiments.delay.__main__ import RESULTS, main
from experiments.delay.results import (
    append_rows,
    by_method,
    final_accuracy,
    read_curves,
    read_iteration_s,
    seconds_to,
    setting_of,
    spread_of,
)
from experiments.delay.settings import FULL, METHODS, NETS, SEEDS, Length, Setting, tried
from experiments.delay.stability import highest_rate
from experiments.delay.study import Study, run_study
from experiments.delay.training import Row, policy_of, train_task

import quorate
from tests.tasks import Toy

SETTING = Setting(net="alexnet", delay=2, repair="lr", lr=0.01, seed=1)


def row(update: int, accuracy: float, setting: Setting = SETTING, diverged: int = 0) -> Row:
    made = training._row(setting, update, float(update), {"accuracy": accuracy, "test_loss": 1.0})
    return made._replace(diverged=diverged)


def test_quick_runs_from_the_study_to_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    names = {"convergence.png", "repairs.png", "tuning.png", "summary.csv", "tuning.csv", "summary.md"}
    assert {Path(line).name for line in shown} == names
    assert all((tmp_path / name).stat().st_size > 100 for name in names)
    finals = by_method(read_curves(tmp_path), tuning=False)
    assert {(net, 4, repair) for net in NETS for repair in ("none", "lr", "warm-up", "compensation")} <= set(finals)
    assert all(rows[-1].update == 4 for trainings in finals.values() for rows in trainings if not rows[-1].diverged)


def test_the_committed_figures_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_bytes((RESULTS / "curves.csv").read_bytes())
    assert main(["figures", "--out", str(tmp_path)]) == 0
    for name in ("summary.csv", "tuning.csv", "summary.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


# ---------------------------------------------------------------- the order of things


def test_every_method_is_tuned_with_as_many_trainings() -> None:
    counts = {len(tried(net, delay, repair)) for net in NETS for delay, repair in METHODS}
    assert counts == {4}


def answers(study: Study, best: dict[tuple[str, int, str], float]) -> list[Setting]:
    """Let every training come out the better, the nearer its rate is to the best one of its method."""
    done = []
    while (setting := study.next()) is not None:
        done.append(setting)
        study.finished(setting, -abs(math.log(setting.lr / best.get(setting.method, 0.01))))
    return done


def test_the_study_trains_what_was_chosen_with_every_seed() -> None:
    done = answers(
        Study(methods=((0, "lr"), (4, "warm-up"))), {("alexnet", 0, "lr"): 0.04, ("alexnet", 4, "warm-up"): 0.005}
    )
    finals = [setting for setting in done if not setting.tuning and setting.net == "alexnet"]
    assert {(one.delay, one.repair, one.lr) for one in finals} == {(d, "none", 0.04) for d in (0, 1, 2, 4)} | {
        (4, "warm-up", 0.005)
    }
    assert len(finals) == 5 * len(SEEDS) and len(set(done)) == len(done)


def test_a_best_rate_at_the_edge_is_looked_beyond() -> None:
    best = {("alexnet", 2, "lr"): 0.0001}
    tuning = [one.lr for one in answers(Study(methods=((2, "lr"),)), best) if one.tuning and one.net == "alexnet"]
    assert tuning == pytest.approx([0.0025, 0.005, 0.01, 0.02, 0.00125, 0.000625])


def test_a_study_goes_on_from_what_is_there() -> None:
    best = {("alexnet", 2, "lr"): 0.0001, ("googlenet", 2, "lr"): 0.1}
    everything = answers(Study(methods=((2, "lr"),)), best)
    for cut in (1, 5, 11, len(everything)):
        study = Study(methods=((2, "lr"),))
        for setting in everything[:cut]:
            study.finished(setting, -abs(math.log(setting.lr / best[setting.method])))
        assert sorted(map(repr, answers(study, best))) == sorted(map(repr, everything[cut:]))


def pretend(setting: Setting, *rest: object) -> list[Row]:
    """A training of another process that comes out at once."""
    return [row(1, 0.2, setting), row(2, min(0.9, setting.lr), setting)]


def never_end(setting: Setting, *rest: object) -> list[Row]:
    threading.Event().wait()
    raise AssertionError("nobody sets it")


def run_in_a_process(folder: Path, limit_s: float) -> bool:
    study = Study(methods=((2, "lr"),), seeds=(1,), most_tried=4)
    options = {"data": None, "device": "cpu", "precision": "tf32", "processes": 1, "limit_s": limit_s}
    return run_study(folder, FULL, study=study, **options)  # type: ignore[arg-type]


def test_trainings_run_in_processes_and_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "train", pretend)
    assert run_in_a_process(tmp_path, math.inf)
    assert len(read_curves(tmp_path)) == 2 * len(NETS) * (4 + 1)
    monkeypatch.setattr(study_module, "train", never_end)
    assert run_in_a_process(tmp_path, math.inf)


def test_at_its_limit_a_study_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "train", never_end)
    assert not run_in_a_process(tmp_path, 0.01)
    assert not multiprocessing.active_children()


# ---------------------------------------------------------------- one training


def test_a_training_is_measured_once_an_epoch() -> None:
    task = Toy(samples=64)
    task.evaluate = lambda model: {"accuracy": 0.5, "test_loss": 1.0}  # type: ignore[attr-defined]
    length = Length(epochs=3, tuning_epochs=1, batch_size=4, train_samples=64)
    rows = train_task(task, SETTING, length, updates=12, epochs=3, device="cpu")
    assert [(one.update, one.epoch) for one in rows] == [(4, 1.0), (8, 2.0), (12, 3.0)]
    assert setting_of(rows[0]) == SETTING


def test_a_training_that_diverges_says_so() -> None:
    class Broken(Toy):
        def loss(self, model, batch):  # type: ignore[no-untyped-def]
            return super().loss(model, batch) * math.nan

    length = Length(epochs=3, tuning_epochs=1, batch_size=4, train_samples=64)
    rows = train_task(Broken(samples=64), SETTING, length, updates=1000, epochs=3, device="cpu")
    assert rows[-1].diverged == 1 and final_accuracy(rows) == 0.1


def test_a_delay_warms_up_over_a_quarter() -> None:
    warm_up = policy_of(replace(SETTING, repair="warm-up", delay=4), 100)
    assert warm_up == quorate.Delayed(4, warm_up=25)
    assert policy_of(SETTING, 100) == quorate.Delayed(2)


# ---------------------------------------------------------------- tables


def test_curves_are_read_as_they_were_written(tmp_path: Path) -> None:
    odd = replace(SETTING, lr=0.1 / 3, compensation=64.0)
    append_rows(tmp_path, [row(1, 0.25, odd), row(2, 1 / 3, odd)])
    append_rows(tmp_path, [row(1, 0.5)])
    assert read_curves(tmp_path) == [row(1, 0.25, odd), row(2, 1 / 3, odd), row(1, 0.5)]
    assert setting_of(read_curves(tmp_path)[0]) == odd


def test_a_spread_counts_what_diverged_as_a_guess() -> None:
    spread = spread_of([[row(1, 0.5)], [row(1, 0.9, diverged=1)], [row(1, 0.6)]])
    assert spread.mean == pytest.approx(0.4) and spread.lowest == 0.1 and spread.diverged == 1


def test_seconds_to_an_accuracy() -> None:
    trainings = [[row(10, 0.2), row(20, 0.6)], [row(10, 0.4), row(20, 0.8)]]
    assert seconds_to(trainings, 0.5, 2.0) == pytest.approx(30.0)
    assert seconds_to(trainings, 0.9, 2.0) is None


def test_without_momentum_the_limit_is_the_known_one() -> None:
    for delay in range(5):
        known = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
        assert highest_rate(delay, 0.0) == pytest.approx(known, rel=1e-3)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["figures", "--out", "{tmp}/nothing"], "there are no curves in"),
        (["run", "--quick"], "give a folder of its own (--out)"),
        (["run", "--processes", "0"], "processes is 0, but it must be at least 1"),
        (["run", "--limit-s", "-1"], "limit-s is -1, but a time must be more than 0"),
        (["run", "--epochs", "resnet=3"], "epochs is 'resnet=3', but it must be"),
        (["run", "--data", "{tmp}/file"], "is a file; unpack"),
        (["figures", "--seconds", "{tmp}/nowhere.csv"], "cannot be read as seconds of iterations"),
        (["figures", "--out", "{tmp}/other"], "is no table of this study"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "curves.csv").write_text("a,b\n1,2\n")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_table_of_seconds_without_a_delay_of_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "seconds.csv").write_text("net,delay,iteration_s\nalexnet,0,1\n")
    (tmp_path / "curves.csv").write_bytes((RESULTS / "curves.csv").read_bytes())
    assert main(["figures", "--out", str(tmp_path), "--seconds", str(tmp_path / "seconds.csv")]) == 2
    assert "the seconds of an iteration of alexnet at delay 1 are missing" in capsys.readouterr().err
    assert read_iteration_s(tmp_path / "seconds.csv") == {("alexnet", 0): 1.0}
