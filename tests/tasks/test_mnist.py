"""MNIST in its original form: files are read or fetched, or the error names the missing file; and the task."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.tasks import files, mnist
from quorate.tasks.images import turned_and_zoomed
from quorate.tasks.mnist import Mnist, WeightNormConv2d, WeightNormLinear, load_mnist, read_idx, small_net

PICTURES, TESTED = 60, 20


def packed(values: torch.Tensor) -> bytes:
    """Bytes in an IDX file, packed; with equal values always the same."""
    header = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(header + bytes(values.flatten().tolist()), mtime=0)


def contents() -> dict[str, bytes]:
    """The four files in small: pictures whose first pixel is their label."""
    made = {}
    for place, count in enumerate((PICTURES, TESTED)):
        draws = torch.Generator().manual_seed(place)
        images = torch.randint(0, 256, (count, 28, 28), generator=draws, dtype=torch.uint8)
        labels = (torch.arange(count) % 10).to(torch.uint8)
        images[:, 0, 0] = labels
        made[mnist.MNIST.files[2 * place]] = packed(images)
        made[mnist.MNIST.files[2 * place + 1]] = packed(labels)
    return made


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> files.SingleFiles:
    """Small files of the same form, published in a folder."""
    place = tmp_path / "published"
    place.mkdir()
    made = contents()
    for name, content in made.items():
        (place / Path(name).name).write_bytes(content)
    small = replace(
        mnist.MNIST,
        url=place.as_uri(),
        md5s=tuple(hashlib.md5(made[name]).hexdigest() for name in mnist.MNIST.files),
        sizes_bytes=tuple(len(made[name]) for name in mnist.MNIST.files),
    )
    monkeypatch.setattr(mnist, "MNIST", small)
    return small


@pytest.fixture
def folder(tmp_path: Path, published: files.SingleFiles) -> Path:
    """A folder that has the files."""
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    for name, content in contents().items():
        (tmp_path / "data" / name).write_bytes(content)
    return tmp_path / "data"


def made_up(samples: int = 96) -> TensorDataset:
    """Digits that are a bright row each, at a place of its own."""
    draws = torch.Generator().manual_seed(3)
    labels = torch.arange(samples) % 10
    images = torch.randint(0, 60, (samples, 1, 28, 28), generator=draws)
    for picture, label in enumerate(labels.tolist()):
        images[picture, :, 4 + 2 * label : 6 + 2 * label] += 180
    return TensorDataset(images.to(torch.uint8), labels)


def small(**options: Any) -> Mnist:
    return Mnist((made_up(), made_up(40)), channels=(4, 4, 4, 8), **options)


# ---------------------------------------------------------------- files


def test_the_original_form_is_read(folder: Path) -> None:
    train, test = load_mnist(folder)
    images, labels = train.tensors
    assert images.shape == (PICTURES, 1, 28, 28) and images.dtype == torch.uint8
    assert len(test) == TESTED and labels.dtype == torch.int64
    assert torch.equal(images[:, 0, 0, 0].long(), labels)
    raw = gzip.decompress(contents()["mnist/train-images-idx3-ubyte.gz"])
    assert bytes(images[3].flatten().tolist()) == raw[16 + 3 * 784 : 16 + 4 * 784]


def test_the_innermost_folder_will_do_and_so_will_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, str(folder / "mnist"))
    assert len(load_mnist()[0]) == PICTURES


def test_only_what_is_missing_is_fetched(published: files.SingleFiles, folder: Path) -> None:
    (folder / published.files[1]).unlink()
    (folder / published.files[0]).write_bytes(b"x" * published.sizes_bytes[0])  # ours, whatever it is
    found = files.files_of(published, folder)
    assert found[0].read_bytes()[:3] == b"xxx"
    assert found[1].read_bytes() == contents()[published.files[1]]
    assert [path.name for path in folder.iterdir()] == ["mnist"]


@pytest.mark.parametrize("which", [0, 3])
def test_what_was_fetched_is_checked_and_all_of_it_is_there_or_nothing(
    published: files.SingleFiles, tmp_path: Path, which: int
) -> None:
    md5s = [*published.md5s]
    md5s[which] = "0000"
    with pytest.raises(quorate.BadInput, match=r"has md5 .*, but MNIST has 0000; try again, or get it from"):
        files.files_of(replace(published, md5s=tuple(md5s)), tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_offline_it_says_what_to_put_where(published: files.SingleFiles, tmp_path: Path) -> None:
    gone = replace(published, url=(tmp_path / "nowhere").as_uri())
    with pytest.raises(quorate.BadInput) as caught:
        files.files_of(gone, tmp_path / "new")
    message = str(caught.value)
    assert not (tmp_path / "new").exists()
    assert "train-images-idx3-ubyte.gz is missing" in message and "No such file" in message
    assert "t10k-labels-idx1-ubyte.gz of file:" in message
    assert f"so that {str(tmp_path / 'new' / published.files[0])!r} and the others are there" in message
    assert "--data of an experiment, or the variable QUORATE_DATA" in message and "\n" not in message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"no gzip", "cannot be unpacked"),
        (gzip.compress(b"\0\0\x0d\1\0\0\0\1abcd"), "is no IDX file of bytes"),
        (gzip.compress(b"\0\0\x08\3\0\0"), "is no IDX file of bytes"),
        (packed(torch.zeros(3, dtype=torch.uint8))[:-9], "cannot be unpacked"),
        (gzip.compress(b"\0\0\x08\1\0\0\0\5abc"), r"has 3 bytes after its header, which promises \[5\]"),
    ],
    ids=["no gzip", "no bytes", "torn header", "torn gzip", "too few bytes"],
)
def test_files_of_another_form(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "file.gz").write_bytes(content)
    with pytest.raises(quorate.BadInput, match=sentence):
        read_idx(tmp_path / "file.gz")


def test_labels_must_fit_the_pictures(tmp_path: Path, published: files.SingleFiles, folder: Path) -> None:
    content = packed(torch.full((PICTURES,), 11, dtype=torch.uint8))
    (folder / published.files[1]).write_bytes(content)
    sizes = (published.sizes_bytes[0], len(content), *published.sizes_bytes[2:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist, "MNIST", replace(published, sizes_bytes=sizes))
        with pytest.raises(quorate.BadInput, match="no label of 0 to 9 for each picture"):
            load_mnist(folder)


# ---------------------------------------------------------------- pictures


def test_pictures_are_turned_and_zoomed_about_their_middle() -> None:
    torch.manual_seed(0)
    images = torch.zeros(200, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 13:15, 13:15] = 255  # the middle stays where it is
    images[:, :, 13:15, 22:24] = 255  # what is right of it moves
    moved = turned_and_zoomed(images, most_degrees=10, most_zoom=0.1)
    right = moved[:, 0, :, 18:]
    rows = (right.sum(2) * torch.arange(28.0)).sum(1) / right.sum((1, 2)) - 13.5
    columns = (right.sum(1) * torch.arange(18.0, 28.0)).sum(1) / right.sum((1, 2)) - 13.5
    assert bool((moved[:, 0, 13:15, 13:15] > 200).all())
    angles, zooms = torch.rad2deg(torch.atan2(rows, columns)), torch.hypot(rows, columns) / 9.0
    assert -10.5 < angles.min() < -8.0 and 8.0 < angles.max() < 10.5
    assert 0.88 < zooms.min() < 0.93 and 1.07 < zooms.max() < 1.12
    assert torch.corrcoef(torch.stack([angles, zooms]))[0, 1].abs() < 0.3


def test_chance_is_torchs_own() -> None:
    images = torch.randint(0, 256, (4, 1, 28, 28), dtype=torch.uint8)
    torch.manual_seed(5)
    first = turned_and_zoomed(images)
    torch.manual_seed(5)
    assert torch.equal(turned_and_zoomed(images), first)
    assert not torch.equal(turned_and_zoomed(images), first)
    assert torch.allclose(turned_and_zoomed(images, 0.0, 0.0), images.float(), atol=1e-2)


# ---------------------------------------------------------------- weight norm


@pytest.mark.parametrize("make", [lambda: WeightNormConv2d(3, 5, 3, padding=1), lambda: WeightNormLinear(3, 5)])
def test_weight_norm_is_torchs(make) -> None:
    torch.manual_seed(0)
    ours = make()
    plain = nn.Conv2d(3, 5, 3, padding=1) if ours.direction.dim() == 4 else nn.Linear(3, 5)
    theirs = nn.utils.parametrizations.weight_norm(plain)
    parts = theirs.parametrizations.weight
    with torch.no_grad():
        assert torch.allclose(ours.weight.flatten(1).norm(dim=1), torch.ones(5))
        ours.length.mul_(1.5)
        ours.bias.normal_()
        parts.original0.copy_(ours.length)
        parts.original1.copy_(ours.direction)
        theirs.bias.copy_(ours.bias)
    inputs = torch.randn(2, 3, 6, 6) if ours.direction.dim() == 4 else torch.randn(2, 3)
    for layer in (ours, theirs):
        layer(inputs).square().sum().backward()
    assert torch.allclose(ours(inputs), theirs(inputs), atol=1e-6)
    assert torch.allclose(ours.length.grad, parts.original0.grad, atol=1e-4)
    assert torch.allclose(ours.direction.grad, parts.original1.grad, atol=1e-4)


def test_the_net_is_the_papers_and_can_be_sent() -> None:
    net = small_net()
    convolutions = [layer for layer in net if isinstance(layer, WeightNormConv2d)]
    assert [layer.direction.shape[2:] for layer in convolutions] == [(3, 3)] * 4
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in net) == 4
    assert 130_000 < sum(parameter.numel() for parameter in net.parameters()) < 140_000
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(pickle.loads(pickle.dumps(net))(images), net(images))


def test_the_first_loss_says_that_nothing_is_known() -> None:
    torch.manual_seed(1)
    task = Mnist((made_up(), made_up()))
    assert abs(task.evaluate(task.model())["test_loss"] - math.log(10)) < 0.6


# ---------------------------------------------------------------- the task


def test_the_task_learns_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, str(folder))
    result = quorate.train("mnist", quorate.Delayed(2, warm_up=1), quorate.Simulated(1), updates=3, batch_size=10)
    assert set(result.evaluation) == {"accuracy", "test_loss", "error"}
    assert result.evaluation["error"] == pytest.approx(1 - result.evaluation["accuracy"])
    assert result.metrics.header["task"] == "mnist"


def test_it_learns() -> None:
    task = Mnist((made_up(), made_up(40)), channels=(8, 8, 16, 16), lr=0.5, augment=False)
    result = quorate.train(task, quorate.FullSync(), quorate.Simulated(1), updates=150, batch_size=32)
    assert result.evaluation["error"] < 0.2


def test_local_and_simulated_workers_compute_the_same() -> None:
    found = [
        quorate.train(small(), quorate.FullSync(), engine, updates=3, batch_size=8, seed=4).parameters
        for engine in (quorate.Simulated(2), quorate.Local(2))
    ]
    assert set(found[0]) == set(found[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_turned_pictures_do_not_keep_a_round_from_being_one_batch() -> None:
    engine = quorate.Simulated(3, together=True)
    result = quorate.train(small(), quorate.FullSync(), engine, updates=2, batch_size=8)
    assert result.metrics.header["engine"]["arithmetic"] == "together"


def test_pictures_are_turned_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(mnist, "turned_and_zoomed", lambda images: calls.append(len(images)) or images)
    task = small()
    model = task.model()
    batch = task.train_data()[:6]
    task.loss(model.train(), batch)
    task.loss(model.eval(), batch)
    task.evaluate(model)
    assert calls == [6]
    small(augment=False).loss(model.train(), batch)
    assert calls == [6]


def test_the_rate_falls_to_nothing_over_the_last_epochs() -> None:
    task = small(updates=100, anneal_share=0.4)
    shares = [task.share_of_lr(version) for version in range(102)]
    assert set(shares[:61]) == {1.0}
    assert shares[80] == pytest.approx(0.5) and shares[99] == pytest.approx(1 / 40)
    assert shares[100] == shares[101] == 0.0
    assert small().share_of_lr(10**6) == 1.0


def test_pictures_that_are_held_out_are_measured_with_and_not_trained_with() -> None:
    train, test = made_up(), made_up(40)
    task = Mnist((train, test), held_out=16)
    assert torch.equal(task.train_data().tensors[0], train.tensors[0][:80])
    assert torch.equal(task._test.tensors[0], train.tensors[0][80:])
    assert torch.equal(Mnist((train, test))._test.tensors[0], test.tensors[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is not known; choose one of: float32, tf32"),
        ({"updates": 0}, "updates is 0, but it must be at least 1"),
        ({"anneal_share": 0.0}, "anneal_share is 0.0"),
        ({"held_out": 96}, "held_out is 96, but there are only 96 training pictures"),
        ({"held_out": -1}, "held_out is -1, but it must be at least 0"),
    ],
)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(quorate.BadInput, match=sentence):
        small(**options)


def test_the_real_files() -> None:
    place = os.environ.get(files.VARIABLE)
    if not place or not (Path(place) / "mnist" / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip("QUORATE_DATA names no folder that has mnist/*.gz")
    train, test = load_mnist(place)
    assert math.isclose(train.tensors[0].float().mean().item() / 255, mnist.MEAN, abs_tol=1e-4)
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.tensors[1][:5].tolist() == [5, 0, 4, 1, 9] and test.tensors[1][:3].tolist() == [7, 2, 1]
