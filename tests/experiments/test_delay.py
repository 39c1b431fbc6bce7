"""The study of delay: in seconds from end to end, and piece by piece."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.pages import REPOSITORY
from experiments.common.command import main
from experiments.common.trials import Table
from experiments.delay import held_out
from experiments.delay.__main__ import EXPERIMENT
from experiments.delay.results import Training, by_method, read_iteration_s, seconds_to, spread_of
from experiments.delay.rows import Row, Setting, final_accuracy
from experiments.delay.settings import METHODS, NETS, SEEDS, Length, wanted
from experiments.delay.stability import highest_rate
from experiments.delay.tables import best_of_delay, cell
from experiments.delay.training import policy_of, train_task

import quorate
from tests.toy_tasks import Toy

RESULTS = EXPERIMENT.results
SETTING = Setting(net="alexnet", delay=2, repair="lr", lr=0.01, seed=1, momentum=0.9)


def row(update: int, accuracy: float, diverged: int = 0) -> Row:
    return Row(float(update), update, accuracy, 1.0, diverged)


def training(*rows: Row) -> Training:
    return Training(SETTING, list(rows))


def curves(folder: Path) -> dict[Setting, list[Row]]:
    return Table(folder / "curves.csv", Setting, Row).read()


@pytest.mark.experiments
def test_quick_runs_from_the_study_to_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    names = {"convergence.png", "repairs.png", "tuning.png", "summary.csv", "tuning.csv", "summary.md"}
    names |= {"held-out.png", "held-out.md"}
    assert {Path(line).name for line in shown[shown.index("complete") + 1 :]} == names
    assert all((tmp_path / name).stat().st_size > 100 for name in names)
    finals = by_method(curves(tmp_path), tuning=False)
    assert {(net, 4, repair) for net in NETS for repair in ("none", "lr", "warm-up", "compensation")} <= set(finals)
    ends = [one.rows[-1] for trainings in finals.values() for one in trainings]
    assert all(end.update == 4 for end in ends if not end.diverged)
    second = Table(tmp_path / "held-out.csv", held_out.Trial, Row).read()
    assert set(second) == set(held_out.wanted(second, held_out.QUICK_PLAN))
    assert {(trial.data, trial.repair) for trial in second if not trial.tuning} == {
        (stage.data, stage.repair) for stage in held_out.QUICK_PLAN.stages
    }
    assert all(rows[-1].update == 4 for rows in second.values() if not rows[-1].diverged)


def test_the_committed_tables_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_bytes((RESULTS / "curves.csv").read_bytes())
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 0
    for name in ("summary.csv", "tuning.csv", "summary.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


def test_the_committed_study_is_complete() -> None:
    found = curves(RESULTS)
    assert set(wanted(found)) == set(found)


# ---------------------------------------------------------------- the order of things


def answers(
    methods: tuple[tuple[int, str], ...],
    best: dict[tuple[str, int, str], float],
    done: tuple[Setting, ...] = (),
) -> list[Setting]:
    """Let every training come out the better, the nearer its rate is to the best one of its method."""

    def rows_of(setting: Setting) -> list[Row]:
        return [row(1, -abs(math.log(setting.lr / best.get(setting.method, 0.01))))]

    found = {setting: rows_of(setting) for setting in done}
    asked = []
    while missing := [setting for setting in wanted(found, methods) if setting not in found]:
        asked.append(missing[0])
        found[missing[0]] = rows_of(missing[0])
    return asked


def test_every_method_is_tuned_with_as_many_trainings() -> None:
    counts = {(net, method): 0 for net in NETS for method in METHODS}
    for setting in wanted({}):
        assert setting.tuning
        counts[setting.net, (setting.delay, setting.repair)] += 1
    assert set(counts.values()) == {4}


def test_the_study_trains_what_was_chosen_with_every_seed() -> None:
    done = answers(((0, "lr"), (4, "warm-up")), {("alexnet", 0, "lr"): 0.04, ("alexnet", 4, "warm-up"): 0.005})
    finals = [setting for setting in done if not setting.tuning and setting.net == "alexnet"]
    assert {(one.delay, one.repair, one.lr) for one in finals} == {(d, "none", 0.04) for d in (0, 1, 2, 4)} | {
        (4, "warm-up", 0.005)
    }
    assert len(finals) == 5 * len(SEEDS) and len(set(done)) == len(done)


def test_a_best_rate_at_the_edge_is_looked_beyond() -> None:
    best = {("alexnet", 2, "lr"): 0.0001}
    tuning = [one.lr for one in answers(((2, "lr"),), best) if one.tuning and one.net == "alexnet"]
    assert tuning == pytest.approx([0.0025, 0.005, 0.01, 0.02, 0.00125, 0.000625])


def test_a_study_goes_on_from_what_is_there() -> None:
    best = {("alexnet", 2, "lr"): 0.0001, ("googlenet", 2, "lr"): 0.1}
    everything = answers(((2, "lr"),), best)
    for cut in (1, 5, 11, len(everything)):
        assert answers(((2, "lr"),), best, done=tuple(everything[:cut])) == everything[cut:]


# ---------------------------------------------------------------- one training

LENGTH = Length(epochs=3, tuning_epochs=1, batch_size=4, train_samples=64)


def test_a_training_is_measured_once_an_epoch() -> None:
    task = Toy(samples=64)
    task.evaluate = lambda model: {"accuracy": 0.5, "test_loss": 1.0}  # type: ignore[attr-defined]
    rows = train_task(task, SETTING, LENGTH, device="cpu")
    assert rows == [Row(epoch, update, 0.5, 1.0, 0) for epoch, update in ((1.0, 4), (2.0, 8), (3.0, 12))]
    (end,) = train_task(task, replace(SETTING, seed=0), LENGTH, device="cpu")
    assert end.update == 4  # the tuning is shorter


def test_a_training_that_diverges_says_so() -> None:
    class Broken(Toy):
        def loss(self, model, batch):  # type: ignore[no-untyped-def]
            return super().loss(model, batch) * math.nan

    length = replace(LENGTH, epochs=300)
    (end,) = train_task(Broken(samples=64), SETTING, length, device="cpu")
    assert end == Row(0.0, 0, 0.1, math.log(10), 1) and final_accuracy([end]) == 0.1
    assert final_accuracy([row(1, 0.9, diverged=1)]) == 0.1


def test_a_delay_warms_up_over_a_quarter() -> None:
    warm_up = policy_of(replace(SETTING, repair="warm-up", delay=4), 100)
    assert warm_up == quorate.Delayed(4, warm_up=25)
    assert policy_of(SETTING, 100) == quorate.Delayed(2)


# ---------------------------------------------------------------- tables


def test_a_spread_counts_what_diverged_as_a_guess() -> None:
    trainings = [training(row(1, 0.5)), training(row(1, 0.9, diverged=1)), training(row(1, 0.6))]
    spread = spread_of(trainings)
    assert spread.mean == pytest.approx(0.4) and spread.lowest == 0.1 and spread.diverged == 1
    assert cell(trainings) == "10.0 to 60.0 (1 of 3 diverged)"
    assert cell([trainings[0], trainings[0], trainings[2]]) == "53.3 ± 14.3"
    assert cell([trainings[1]] * 3) == "diverged (3 of 3)"


def test_seconds_to_an_accuracy() -> None:
    trainings = [training(row(10, 0.2), row(20, 0.6)), training(row(10, 0.4), row(20, 0.8))]
    assert seconds_to(trainings, 0.5, 2.0) == pytest.approx(30.0)
    assert seconds_to(trainings, 0.9, 2.0) is None


def test_without_momentum_the_limit_is_the_known_one() -> None:
    for delay in range(5):
        known = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
        assert highest_rate(delay, 0.0) == pytest.approx(known, rel=1e-3)


def test_the_page_says_what_a_delay_of_1_took() -> None:
    finals = by_method(curves(RESULTS), tuning=False)
    more = []
    for net in NETS:
        late = finals[net, 1, best_of_delay(finals, net, 1) or ""]
        end = spread_of(late).mean
        with_delay, without = (seconds_to(some, end, 1.0) for some in (late, finals[net, 0, "none"]))
        assert with_delay is not None and without is not None
        more.append(f"{with_delay / without:.2f}")
    page = " ".join((REPOSITORY / "docs" / "delay.md").read_text(encoding="utf-8").split())
    assert f"it took {more[0]} (alexnet) and {more[1]} times (googlenet) as many updates" in page


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["figures", "--out", "{tmp}/nothing"], "there are no results in"),
        (["run", "--data", "{tmp}/file"], "is a file; unpack"),
        (["figures", "--out", "{tmp}/other"], "has other columns than this experiment's table"),
        (["figures", "--out", "{tmp}/seconds"], "cannot be read as seconds of iterations"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for name, content in (("other", "a,b\n1,2\n"), ("seconds", (RESULTS / "curves.csv").read_text())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "curves.csv").write_text(content)
    (tmp_path / "seconds" / "iteration_seconds.csv").write_text("net,delay\nalexnet,0\n")
    assert main(EXPERIMENT, [argument.format(tmp=tmp_path) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_table_of_seconds_without_a_delay_of_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iteration_seconds.csv").write_text("net,delay,iteration_s\nalexnet,0,1\n")
    (tmp_path / "curves.csv").write_bytes((RESULTS / "curves.csv").read_bytes())
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 2
    assert "the seconds of an iteration of alexnet at delay 1 are missing" in capsys.readouterr().err
    assert read_iteration_s(tmp_path / "iteration_seconds.csv") == {("alexnet", 0): 1.0}
