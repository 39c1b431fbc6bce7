"""Races: what is trained and in which order, what is read off the curves; and the three that are races, in seconds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common.command import Experiment, main
from experiments.common.curves import Point
from experiments.common.race import TUNING_SEED, Control, Method, Race, Trial, seconds_an_update
from experiments.common.race_results import write_race
from experiments.common.race_tables import seconds_to
from experiments.common.spread import spread_of
from experiments.language import results as language_results
from experiments.language import training as language_training
from experiments.language.__main__ import EXPERIMENT as LANGUAGE
from experiments.language.settings import OWN_RATE, shared_rate
from experiments.pixelcnn import results as pixelcnn_results
from experiments.pixelcnn import training as pixelcnn_training
from experiments.pixelcnn.__main__ import EXPERIMENT as PIXELCNN
from experiments.pixelcnn.settings import CLIP_NORM, LEFT, ONE, SLOW
from experiments.reinforcement.__main__ import EXPERIMENT as REINFORCEMENT
from torch.utils.data import TensorDataset

import quorate
from tests.toy_tasks import Toy

RACE = Race(
    methods=(
        Method("async", quorate.Async(), 4, (0.1, 0.2)),
        Method("sync", quorate.FullSync(), 4, (0.4, 0.8)),
    ),
    latencies=("constant:2", "constant:1"),
    seconds=40.0,
    tuning_seconds=10.0,
    seeds=(1, 2, 3),
    measure="error",
    unit="error",
    rising=False,
    reference="sync",
    most_rates=3,
)


def played(race: Race, best: dict[str, float]) -> dict[Trial, list[Point]]:
    """Let every training end the better, the nearer its rate is to its method's best one."""
    found: dict[Trial, list[Point]] = {}
    while left := [trial for trial in race.wanted(found) if trial not in found]:
        trial = left[0]
        end = 0.1 + abs(math.log(trial.lr / best[trial.method])) + 0.01 * trial.seed
        found[trial] = [
            Point(step, trial.seconds * step / 4, step, end + (4 - step) / 8, math.nan) for step in range(5)
        ]
    return found


def test_every_method_is_tuned_and_then_run_with_every_seed_in_every_world() -> None:
    found = played(RACE, {"async": 0.2, "sync": 0.4})
    tuning = [trial for trial in found if trial.seed == TUNING_SEED]
    assert {(one.method, one.lr) for one in tuning} == {
        *(("async", rate) for rate in (0.1, 0.2, 0.4)),
        *(("sync", rate) for rate in (0.2, 0.4, 0.8)),
    }
    assert {(one.latency, one.seconds) for one in tuning} == {("constant:2", 10.0)}
    finals = {trial for trial in found if trial.seed != TUNING_SEED}
    assert finals == {
        Trial(name, latency, rate, seed, 40.0)
        for name, rate, latency in [
            ("async", 0.2, "constant:2"),
            ("async", 0.2, "constant:1"),
            ("sync", 0.4, "constant:2"),
            ("sync", 0.4, "constant:1"),
        ]
        for seed in (1, 2, 3)
    }


def test_synchronous_methods_are_also_run_with_less_time(tmp_path: Path) -> None:
    race = replace(RACE, reference="one", shares=(0.25,))
    race = replace(race, methods=(*race.methods, Method("one", quorate.FullSync(), 1, (0.4, 0.8))))
    found = played(race, {"async": 0.2, "sync": 0.4, "one": 0.4})
    shorter = [trial for trial in found if trial.seconds == 10.0 and trial.seed != TUNING_SEED]
    assert shorter == [Trial("sync", "constant:2", 0.4, seed, 10.0) for seed in (1, 2, 3)]
    found[shorter[0]][-1] = found[shorter[0]][-1]._replace(measure=9.0)
    files = write_race(race, found, tmp_path)
    text = files[0].read_text()
    assert "| one | 0.667 minutes | 1.0× | 0.4 | 4 | 0.120 ± 0.025 | 3 of 3 |" in text
    assert "| sync | 0.167 minutes | 4.0× | 0.4 | 4 | 3.083 ± 12.730 | 2 of 3 |" in text
    assert files[-1].name == "ends.png" and files[-1].stat().st_size > 1000


def test_half_the_rate_is_tried_where_it_is_asked_for(tmp_path: Path) -> None:
    race = replace(RACE, halved=(("sync", 0.5),))
    found = played(race, {"async": 0.2, "sync": 0.4})
    halved = [trial for trial in found if trial.seconds == 20.0]
    assert halved == [Trial("sync", "constant:2", 0.2, seed, 20.0) for seed in (1, 2, 3)]
    text = write_race(race, found, tmp_path)[0].read_text()
    assert "At half the rate, latency constant:2" in text
    assert "| sync | 0.333 minutes | 2.0× | 0.2 | 4 | 0.813 ± 0.025 | 0 of 3 |" in text
    assert "| sync | 0.333 minutes | 2.0× | 0.4 |" not in text, "with its own rate it was run over another time"


def test_controls_have_the_rate_of_another_method_or_a_part_of_their_own_and_equal_updates_where_they_are_to() -> None:
    other = Method("other", quorate.BackupSync(3, 1), 4, ())
    controls = (
        Control("sync", 0.5, protocol="slow", share=0.5),
        Control("other", rate_of="sync", equal_updates=True, seeds=(4, 5), latencies=("lognormal:1,0.5",)),
    )
    race = replace(RACE, reference="sync", untuned=(other,), controls=controls)
    found = played(race, {"async": 0.2, "sync": 0.4, "other": 0.4})
    assert list(found)[-5:-2] == [Trial("sync", "constant:2", 0.2, seed, 20.0, "slow") for seed in (1, 2, 3)]
    sync, split = (
        seconds_an_update(policy, 4, "lognormal:1,0.5") for policy in (quorate.FullSync(), quorate.BackupSync(3, 1))
    )
    updates = round(40.0 / sync)
    equal = [Trial("other", "lognormal:1,0.5", 0.4, seed, float(f"{updates * split:.6g}")) for seed in (4, 5)]
    assert list(found)[-2:] == equal and split < sync
    assert {race.updates(trial) for trial in equal} == {updates}
    assert race.controlled(controls[1], found, "lognormal:1,0.5") == [found[trial] for trial in equal]
    assert race.controlled(controls[1], found) == [], "nothing under the first latency"
    assert not any(trial.method == "other" and trial.seed == TUNING_SEED for trial in found)


def test_the_slow_decay_of_the_pixelcnn_ends_at_its_share_and_clips_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Race, "train", lambda self, trial, task, device, **options: seen.append((task, options)))
    for protocol in ("", SLOW):
        pixelcnn_training.train(Trial("7+1", "chen2016", 0.1, 1, 10_000.0, protocol), quick=True)
    (step, unclipped), (slow, clipped) = seen
    assert unclipped == {} and clipped == {"clip_norm": CLIP_NORM}
    updates = slow.updates
    assert step.share_of_lr(updates // 2) == 1.0 and step.share_of_lr(updates - 1) == LEFT
    assert slow.share_of_lr(updates // 2) == pytest.approx(math.sqrt(LEFT), rel=0.01)
    assert slow.share_of_lr(updates - 1) == pytest.approx(LEFT, rel=0.01)
    shares = [slow.share_of_lr(version) for version in range(updates // 50 + 1, updates)]
    assert shares == sorted(shares, reverse=True) and slow.share_of_lr(0) < 0.05


def test_the_better_of_two_rates_gives_the_hours_and_a_seed_that_is_missing_or_never_there_is_not_a_mean() -> None:
    best = {"async 16": 1.25e-5, "async 8": 2.5e-5, ONE: 2e-4, "7+1": 4e-4, "15+1": 4e-4, "8+0": 4e-4, "16+0": 2e-4}
    race = PIXELCNN.full
    found = played(race, best)
    assert [pixelcnn_results.better(race, found, name) for name in (ONE, "7+1", "16+0")] == [1.0, 1.0, 0.5]
    assert pixelcnn_results.end(race, found, "16+0", 0.5) == spread_of([0.11, 0.12, 0.13])
    aims = pixelcnn_results.targets(race, found)
    assert aims == pytest.approx([0.13 + 3 / 8, 0.13 + 2 / 8, 0.13])
    quarter = 20_000 / 4 / 3600
    reached = pixelcnn_results.hours(race, found, "16+0", aims[0])
    assert reached is not None and reached.highest == pytest.approx(quarter)
    control = pixelcnn_results.control(race, "16+0", 0.5)
    assert control is not None
    one = race.trials_of(control, found, "chen2016")[0]
    found[one] = [point._replace(measure=point.measure + 9) for point in found[one]]
    assert pixelcnn_results.better(race, found, "16+0") == 1.0
    assert pixelcnn_results.hours(race, found, "16+0", aims[2]) is None
    del found[one]
    assert pixelcnn_results.end(race, found, "16+0", 0.5) is None
    text = pixelcnn_results.table(race, found)
    assert "| 16+0 | 0.0004 | 4 | 0.813 ± 0.025 | – |" in text and "never" in text


def test_at_equal_updates_a_backup_changes_seconds_alone() -> None:
    race = LANGUAGE.full
    found = played(race, {"full sync": 2e-3, "14+2": 4e-3, "softsync 4": 5e-4, "async": 2.5e-4} | UNTUNED)
    tail = race.latencies[1]
    for trial in race.trials_of(OWN_RATE, found, tail):
        found[trial] = [point._replace(seconds=point.seconds / 2) for point in found[trial]]
    lines = {(line.name, line.rate): line for line in language_results.rows(race, found, tail)}
    assert list(lines) == [("full sync", 2e-3), *((f"{16 - b}+{b}", 2e-3) for b in (1, 2, 4, 8)), ("14+2", 4e-3)]
    none, two = lines["full sync", 2e-3], lines["14+2", 2e-3]
    assert none.equal == none.end and none.sooner is not None and none.sooner.mean == 1.0
    assert two.update_s < none.update_s / 4 and two.updates == none.updates, "made-up curves have four updates"
    trials = race.trials_of(shared_rate(2, equal_updates=True), found, tail)
    assert {race.updates(trial) for trial in trials} == {race.updates(Trial("full sync", tail, 2e-3, 1, race.seconds))}
    assert two.equal == spread_of([race.final(found[trial]) for trial in trials])
    assert two.sooner is None, "0.69 + …: at full sync's rate the made-up 14+2 never reaches the target"
    own = lines["14+2", 4e-3]
    assert own.sooner is not None and own.sooner.mean == pytest.approx(2.0)
    assert "| 14+2 | 0.004 |" in language_results.table(race, found)


#: Rates at which methods without a tuning of their own are best in made-up curves.
UNTUNED = {"15+1": 2e-3, "12+4": 2e-3, "8+8": 2e-3}


def test_the_average_looks_back_over_a_share_of_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("experiments.common.race.train_curve", lambda *_, **options: seen.append(options))
    for share in (0.0, 0.5):
        replace(RACE, averaged_share=share).train(Trial("sync", "constant:2", 0.4, 1, 40.0), Toy(), "cpu")
    assert "ema" not in seen[0]
    assert seen[1]["ema"] == pytest.approx(1 - 1 / 10)  # of 20 updates


def test_what_diverged_is_never_chosen() -> None:
    good, bad = Point(1, 1.0, 1, 0.5, 0.0), Point(1, 1.0, 1, 0.1, 0.0, diverged=1)
    assert RACE.score([good]) == -0.5 and RACE.score([bad]) == -math.inf
    assert RACE.score([good._replace(measure=math.nan)]) == -math.inf
    assert replace(RACE, rising=True, last=2).score([good, good._replace(measure=0.7)]) == pytest.approx(0.6)


def test_targets_are_those_that_every_seed_of_the_reference_reaches() -> None:
    found = played(RACE, {"async": 0.2, "sync": 0.4})
    targets = RACE.all_targets(found, "constant:2")
    assert targets == pytest.approx([0.13 + 3 / 8, 0.13 + 2 / 8, 0.13])
    assert replace(RACE, targets=(1.0,)).all_targets(found, "constant:2") == [1.0]
    turned = {trial: [point._replace(measure=-point.measure) for point in found[trial]] for trial in found}
    assert replace(RACE, rising=True).all_targets(turned, "constant:2") == pytest.approx(
        [-target for target in targets]
    )
    curves = RACE.curves("sync", found, "constant:2")
    assert len(seconds_to(RACE, curves, targets[-1])) == 3
    assert seconds_to(RACE, curves, targets[1]) == pytest.approx([40 / 4 * (2 - 8 * 0.02), 40 / 4 * (2 - 8 * 0.01), 20])
    assert seconds_to(RACE, curves, 0.0) == []
    lucky = [Point(step, float(step), 0, measure, 0.0) for step, measure in enumerate((9, 1, 9, 4, 2, 1, 1))]
    assert seconds_to(replace(RACE, last=1), [lucky], 2.0) == pytest.approx([0.875])
    assert seconds_to(replace(RACE, last=3), [lucky], 3.0) == pytest.approx([4.75])


def test_tables_say_who_never_gets_there_and_how_much_sooner_others_do(tmp_path: Path) -> None:
    found = played(RACE, {"async": 0.2, "sync": 0.4})
    for trial in list(found):
        if trial.method == "async" and trial.seed == 2:
            found[trial] = [point._replace(measure=9.0) for point in found[trial]]
        elif trial.method == "async" and trial.seed:
            found[trial] = [point._replace(seconds=point.seconds / 2) for point in found[trial]]
    files = write_race(RACE, found, tmp_path)
    assert [file.name for file in files] == ["summary.md", "curves.png", "tuning.png"]
    text = files[0].read_text()
    assert "| sync | 0.4 | 4 | 0.120 ± 0.025 |" in text and "(1.00×)" in text
    assert "never in 1 of 3 seeds" in text
    assert "| async | 3 | 0.1: 0.7931, **0.2: 0.1**, 0.4: 0.7931 |" in text
    assert all(file.stat().st_size > 1000 for file in files[1:])


def test_a_trial_is_as_long_as_it_says() -> None:
    task = Toy(samples=64)
    task.evaluate = lambda model: {"error": 0.5}  # type: ignore[attr-defined]
    trial = Trial("sync", "constant:2", 0.1, 1, 40.0)
    assert seconds_an_update(quorate.FullSync(), 4, "constant:2") == pytest.approx(2.0)
    points = replace(RACE, evaluations=4).train(trial, task, "cpu")
    assert [(point.update, point.seconds) for point in points] == [(5, 10.0), (10, 20.0), (15, 30.0), (20, 40.0)]
    assert RACE.updates(replace(trial, method="async")) == 80


def test_a_folder_without_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LANGUAGE, ["figures", "--out", str(tmp_path)]) == 2
    assert "there are no results in" in capsys.readouterr().err


@pytest.mark.parametrize("experiment", [PIXELCNN, LANGUAGE, REINFORCEMENT], ids=lambda one: one.name)
def test_every_method_begins_with_as_many_rates(experiment: Any) -> None:
    assert {len(method.rates) for method in experiment.full.methods} == {4}
    assert len(experiment.full.seeds) >= 3 and TUNING_SEED not in experiment.full.seeds


def test_the_tuning_never_sees_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("15+1", "chen2016", 0.1, TUNING_SEED, 10.0)
    everything = TensorDataset(torch.arange(5000)), TensorDataset(torch.arange(9000, 9100))
    monkeypatch.setattr(pixelcnn_training, "load_cifar10", lambda data: everything)
    train, test = pixelcnn_training.data_of(trial, None)
    assert (len(train), len(test)) == (4000, 1000)
    assert sorted(torch.cat([*train.tensors, *test.tensors]).tolist()) == list(range(5000))
    assert pixelcnn_training.data_of(replace(trial, seed=1), None) == everything
    monkeypatch.setattr(language_training, "load_shakespeare", lambda data: "a" * 90 + "b" * 10)
    assert set(language_training.text_of(trial, None)) == {"a"}
    assert len(language_training.text_of(replace(trial, seed=1), None)) == 100


@pytest.mark.experiments
@pytest.mark.parametrize("experiment", [PIXELCNN, LANGUAGE, REINFORCEMENT], ids=lambda one: one.name)
def test_quick_runs_from_the_trials_to_the_figures(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(experiment, ["run", "--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    more = {PIXELCNN: {"ends.png", "slow.md", "slow.png"}, LANGUAGE: {"backups.md", "backups.png"}}.get(
        experiment, set()
    )
    wanted = {"summary.md", "curves.png", "tuning.png", *more.get(experiment.name, ())}
    assert {Path(line).name for line in shown if line.startswith(str(tmp_path))} == wanted
    assert "complete" in shown
    assert all((tmp_path / name).stat().st_size > 300 for name in wanted)
