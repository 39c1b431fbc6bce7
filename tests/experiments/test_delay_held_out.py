"""The study of delay, second protocol: the split, who chooses a rate, the order of trials, the second data set."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.pages import REPOSITORY, block
from experiments.common.spread import spread_of
from experiments.delay import held_out_tables, tiny_imagenet, training
from experiments.delay.__main__ import _data_sets
from experiments.delay.held_out import (
    CIFAR,
    CLIP_NORMS,
    DATA_SETS,
    FULL_PLAN,
    STAGES,
    TINY,
    Plan,
    Stage,
    Trial,
    length_of,
    split,
    tuning_of,
    wanted,
)
from experiments.delay.rows import Row, final_accuracy
from experiments.delay.settings import NETS, SEEDS
from experiments.pages.found import found
from torch.utils.data import TensorDataset

from quorate.errors import BadInput
from quorate.tasks.cifar10 import Cifar10

PAGE = REPOSITORY / "docs" / "delay.md"
TRIAL = Trial(data=CIFAR, net="alexnet", delay=1, repair="lr", momentum=0.9, lr=0.01)

# ---------------------------------------------------------------- the split


def numbered(samples: int) -> TensorDataset:
    """The picture of number i is i everywhere, and so is its label."""
    numbers = torch.arange(samples)
    return TensorDataset(numbers.view(-1, 1, 1, 1).expand(-1, 3, 2, 2), numbers)


def test_held_out_pictures_are_none_of_those_trained_with() -> None:
    kept, out = split(numbered(100), 10)
    assert len(kept) == 90 and len(out) == 10
    assert sorted([*kept.tensors[1].tolist(), *out.tensors[1].tolist()]) == list(range(100))
    for part in (kept, out):
        assert torch.equal(part.tensors[0][:, 0, 0, 0], part.tensors[1])


def test_the_split_is_fixed_by_its_seed() -> None:
    torch.manual_seed(1)
    first = split(numbered(50_000), 5_000)[1].tensors[1]
    torch.manual_seed(2)
    assert torch.equal(split(numbered(50_000), 5_000)[1].tensors[1], first)
    assert first[:4].tolist() == [2531, 30480, 5321, 15470]  # another split is another experiment


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_tuning_never_sees_test_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, test = DATA_SETS[name], numbered(7)
    train = numbered(one.samples)
    monkeypatch.setattr(training, "load_cifar10", lambda data: (train, test))
    monkeypatch.setattr(tiny_imagenet, "load", lambda data: (train, test))
    training._parts.cache_clear()
    tuned_with, out = training.parts_of(replace(TRIAL, data=name, seed=0), None, quick=False)
    trained_with, measured = training.parts_of(replace(TRIAL, data=name, seed=1), None, quick=False)
    training._parts.cache_clear()
    assert len(out) == one.held_out and measured is test
    assert not set(out.tensors[1].tolist()) & set(trained_with.tensors[1].tolist())
    assert tuned_with is trained_with and len(trained_with) == length_of(name, "alexnet").train_samples


# ---------------------------------------------------------------- the tuning and the order


def answers(
    plan: Plan,
    best_rate: float,
    best_norm: float = 4.0,
    data_sets: tuple[str, ...] = (CIFAR, TINY),
    done: Sequence[Trial] = (),
) -> list[Trial]:
    """All trials in their order. Each comes out the better, the nearer its rate and norm are to the best ones."""

    def rows_of(trial: Trial) -> list[Row]:
        off = abs(math.log(trial.lr / best_rate)) + (trial.clip not in (0.0, best_norm)) / 10
        return [Row(1.0, 1, -off, 1.0, 0)]

    found = {trial: rows_of(trial) for trial in done}
    while missing := [trial for trial in wanted(found, plan, data_sets) if trial not in found]:
        found[missing[0]] = rows_of(missing[0])
    return list(found)


def test_trials_of_the_tuning_are_as_long_as_those_of_the_result() -> None:
    for name in DATA_SETS:
        for net in NETS:
            length = length_of(name, net)
            assert length.updates(tuning=True) == length.updates(tuning=False)


def test_stages_run_in_the_order_of_what_they_are_worth() -> None:
    done = answers(FULL_PLAN, best_rate=0.03)
    stages = [(trial.data, trial.delay, trial.repair) for trial in done]
    of_stages = [[(stage.data, delay, stage.repair) for delay in stage.delays] for stage in STAGES]
    first = [min(stages.index(one) for one in some) for some in of_stages]
    assert first == sorted(first)
    assert STAGES[0] == Stage(CIFAR, (0, 1), "lr")
    assert {(delay, repair) for data, delay, repair in stages if data == CIFAR} >= {
        (delay, repair) for delay in (1, 2, 4) for repair in ("lr", "clip", "warm-up")
    }


def test_every_method_begins_with_as_many_rates_and_ends_with_every_seed() -> None:
    done = answers(FULL_PLAN, best_rate=0.03)
    for name, delay, repair in {(trial.data, trial.delay, trial.repair) for trial in done}:
        for net in NETS:
            of = [one for one in done if (one.data, one.net, one.delay, one.repair) == (name, net, delay, repair)]
            assert len({one.lr for one in of if one.tuning}) >= 4
            assert [one.seed for one in of if not one.tuning] == list(SEEDS)
            assert len({(one.lr, one.clip) for one in of if not one.tuning}) == 1


def test_a_run_goes_on_where_it_stopped() -> None:
    plan = Plan(STAGES[:2])
    everything = answers(plan, best_rate=0.03)
    for cut in (1, 9, len(everything) - 1, len(everything)):
        assert answers(plan, best_rate=0.03, done=everything[:cut]) == everything


def test_clipping_chooses_its_norm_at_the_best_rate() -> None:
    done = answers(Plan((Stage(CIFAR, (1,), "clip"),)), best_rate=0.02)
    of = [trial for trial in done if trial.net == "alexnet"]
    assert [one.clip for one in of if one.tuning] == [1.0] * 4 + list(CLIP_NORMS[1:])
    assert {one.clip for one in of if not one.tuning} == {4.0} and {one.lr for one in of if not one.tuning} == {0.02}


def test_a_net_that_diverges_guesses_among_its_classes() -> None:
    diverged = [Row(1.0, 1, 0.5, 1.0, 1)]
    assert final_accuracy(diverged, replace(TRIAL, data=TINY).guessing) == 0.05
    assert final_accuracy(diverged, TRIAL.guessing) == 0.1


def test_without_the_second_data_set_its_trainings_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _data_sets(tmp_path) == [CIFAR]
    said = capsys.readouterr().out
    assert "tiny-imagenet-20.pt' is missing, so the trainings with tiny-imagenet-20 are skipped" in said
    assert {trial.data for trial in answers(FULL_PLAN, 0.03, data_sets=(CIFAR,))} == {CIFAR}


# ---------------------------------------------------------------- tables and the page


def curve(*accuracies: float) -> list[Row]:
    return [Row(float(update), update, accuracy, 1.0, 0) for update, accuracy in enumerate(accuracies, 1)]


def test_held_out_pictures_choose_what_stands_for_a_delay() -> None:
    clipped = replace(TRIAL, repair="clip", clip=1.0)
    curves = {
        TRIAL: curve(0.5),
        clipped: curve(0.6),
        replace(TRIAL, seed=1): curve(0.9),  # the test pictures would choose the other one
        replace(clipped, seed=1): curve(0.4, 0.7),
        replace(TRIAL, delay=0): curve(0.8),
        replace(TRIAL, delay=0, seed=1): curve(0.35, 0.7),
    }
    assert held_out_tables.chosen_repair(curves, CIFAR, "alexnet", 1) == "clip"
    assert held_out_tables.chosen_repair(curves, CIFAR, "alexnet", 2) is None
    times = held_out_tables.times(curves, {("alexnet", 0): 3.0, ("alexnet", 1): 2.0})
    assert times.splitlines()[2:] == ["| cifar-10 | alexnet | 1 | its own rate, clipped | 70.0 | 4 | 6 | 1.50 |"]
    table = held_out_tables.accuracies(curves)
    assert "| cifar-10 | alexnet | 1 | 90.0 (1 seed), rate 0.01 | 70.0 (1 seed), rate 0.01, norm 1 | not run |" in table
    assert "| cifar-10 | googlenet | 0 | not run |  |  |" in table


def test_what_was_committed_is_what_the_protocol_wants() -> None:
    curves = found("delay/held-out")
    assert set(curves) <= set(wanted(curves))
    assert ("was **not run yet**" in PAGE.read_text(encoding="utf-8")) is (not curves)


def test_the_page_says_how_large_the_nets_are() -> None:
    table = block(PAGE.read_text(encoding="utf-8"), "nets")
    pictures = TensorDataset(torch.zeros(1, 3, 32, 32), torch.zeros(1))
    for net in NETS:
        model = Cifar10(net, (pictures, pictures)).model()
        size = sum(math.prod(one.shape) for one in model.parameters() if one.requires_grad)
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {net} ")]
        assert row.split(" | ")[1] == f"{size:,}"


def test_the_page_says_what_an_interval_is() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    (said,) = re.findall(r"three seeds it is ([\d.]+) times the standard deviation", text)
    values = [0.1, 0.4, 0.5]
    deviation = math.sqrt(sum((one - sum(values) / 3) ** 2 for one in values) / 2)
    assert said == f"{spread_of(values).half_width / deviation:.2f}"


# ---------------------------------------------------------------- Tiny-ImageNet


def archive(folder: Path, classes: int = 22) -> Path:
    """The same folders and names, with pictures of one colour: class i is i everywhere."""
    image = pytest.importorskip("PIL.Image")
    root = folder / "tiny-imagenet-200"
    lines = []
    (root / "val" / "images").mkdir(parents=True)
    for label in range(classes):
        name = f"n{label:08d}"
        (root / "train" / name / "images").mkdir(parents=True)
        for number in range(2):
            mode, colour = ("L", label) if number else ("RGB", (label,) * 3)
            image.new(mode, (64, 64), colour).save(root / "train" / name / "images" / f"{name}_{number}.JPEG")
        image.new("RGB", (64, 64), (label,) * 3).save(root / "val" / "images" / f"val_{label}.JPEG")
        lines.append(f"val_{label}.JPEG\t{name}\t0\t0\t1\t1\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def test_tiny_imagenet_is_packed_into_one_file_of_32_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_imagenet.pack(archive(tmp_path), tmp_path / "data") == tiny_imagenet.file_of(tmp_path / "data")
    train, test = tiny_imagenet.load(tmp_path / "data")
    assert train.tensors[0].shape == (40, 3, 32, 32) and test.tensors[0].shape == (20, 3, 32, 32)
    assert train.tensors[0].dtype == torch.uint8 and test.tensors[1].tolist() == list(range(20))
    for part in (train, test):
        colours = part.tensors[0].long()
        assert (colours - part.tensors[1].view(-1, 1, 1, 1)).abs().max() <= 2  # JPEG loses a little
    assert _data_sets(tmp_path / "data") == [CIFAR, TINY] and capsys.readouterr().out == ""


def test_tiny_imagenet_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no train and val"):
        tiny_imagenet.pack(tmp_path, tmp_path)
    with pytest.raises(BadInput, match="has 3 classes and 3 pictures to test with"):
        tiny_imagenet.pack(archive(tmp_path, classes=3), tmp_path)
    tiny_imagenet.file_of(tmp_path).write_text("no pictures")
    with pytest.raises(BadInput, match="cannot be read as pictures"):
        tiny_imagenet.load(tmp_path)


def test_the_rates_of_a_delay_of_1_reach_those_of_no_delay() -> None:
    """The first protocol did not try them, and one of them was better than the rate it chose."""
    for net, best in {"alexnet": 0.08, "googlenet": 0.4}.items():
        assert best in {trial.lr for trial in tuning_of(CIFAR, net, 1, "lr", {})[0]}
