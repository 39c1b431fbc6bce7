"""CIFAR-10 in its original form: files are read or fetched, or the error names the missing file; and the task."""

from __future__ import annotations

import hashlib
import io
import math
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import quorate
from quorate.task import load_task
from quorate.tasks import cifar10, files
from quorate.tasks.cifar10 import Cifar10, alexnet, load_cifar10, read_binary
from quorate.tasks.images import accuracy_and_loss, shifted_and_flipped, standardised

PICTURES = 40


def content_of(name: str) -> bytes:
    """A file in the original form: a label, then three planes; the label is the first byte of the planes too."""
    draws = torch.Generator().manual_seed(len(name) + ord(name[-5]))
    table = torch.randint(0, 256, (PICTURES, 3073), generator=draws, dtype=torch.uint8)
    table[:, 0] = torch.arange(PICTURES) % 10
    table[:, 1] = table[:, 0]
    return bytes(table.flatten().tolist())


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> files.Archive:
    """A small archive of the same form, published as a file."""
    packed = tmp_path / "published.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        for name in cifar10.CIFAR10.files:
            member = tarfile.TarInfo(name)
            member.size = len(content_of(name))
            tar.addfile(member, io.BytesIO(content_of(name)))
    small = replace(
        cifar10.CIFAR10,
        url=packed.as_uri(),
        md5=hashlib.md5(packed.read_bytes()).hexdigest(),
        sizes_bytes=(PICTURES * 3073,) * 6,
    )
    monkeypatch.setattr(cifar10, "CIFAR10", small)
    monkeypatch.setitem(cifar10.NETS, "alexnet", partial(alexnet, width=0.1, dense=16))
    return small


@pytest.fixture
def folder(tmp_path: Path, archive: files.Archive) -> Path:
    """A folder that has the files."""
    for name in archive.files:
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content_of(name))
    return tmp_path / "data"


# ---------------------------------------------------------------- files


def test_the_original_form_is_read(folder: Path) -> None:
    train, test = load_cifar10(folder)
    images, labels = train.tensors
    assert images.shape == (5 * PICTURES, 3, 32, 32) and images.dtype == torch.uint8
    assert len(test) == PICTURES
    assert torch.equal(images[:, 0, 0, 0].long(), labels)
    raw = content_of("cifar-10-batches-bin/data_batch_1.bin")
    assert bytes(images[3].flatten().tolist()) == raw[3 * 3073 + 1 : 4 * 3073]


def test_the_innermost_folder_will_do_and_so_will_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, str(folder / "cifar-10-batches-bin"))
    assert len(load_cifar10()[0]) == 5 * PICTURES


def test_without_a_folder_it_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(files.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.data_folder() == tmp_path / "quorate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.data_folder() == Path.home() / ".cache" / "quorate"


def test_what_is_missing_is_fetched_and_nothing_else_is_left_behind(archive: files.Archive, tmp_path: Path) -> None:
    found = files.files_of(archive, tmp_path / "new")
    assert [file.read_bytes() for file in found] == [content_of(name) for name in archive.files]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["cifar-10-batches-bin"]


def test_what_was_fetched_is_checked(archive: files.Archive, tmp_path: Path) -> None:
    with pytest.raises(quorate.BadInput, match=r"has md5 .*, but CIFAR-10 has 0000; try again, or get it from"):
        files.files_of(replace(archive, md5="0000"), tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_offline_it_says_what_to_put_where(archive: files.Archive, tmp_path: Path) -> None:
    gone = replace(archive, url=(tmp_path / "nowhere.tar.gz").as_uri())
    with pytest.raises(quorate.BadInput) as caught:
        files.files_of(gone, tmp_path / "new")
    message = str(caught.value)
    assert not (tmp_path / "new").exists()
    assert "data_batch_1.bin is missing" in message and "No such file" in message
    assert f"unpack {gone.url} so that {str(tmp_path / 'new' / archive.files[0])!r}" in message
    assert "data=…, --data of an experiment, or the variable QUORATE_DATA" in message and "\n" not in message


def test_a_file_of_another_size_is_refused(folder: Path, archive: files.Archive) -> None:
    (folder / archive.files[2]).write_bytes(b"123")
    with pytest.raises(quorate.BadInput, match=r"data_batch_3.bin' has 3 bytes, but that file of CIFAR-10 has 122920"):
        load_cifar10(folder)


def test_a_folder_that_is_a_file(archive: files.Archive, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(quorate.BadInput, match="is a file; unpack"):
        files.files_of(archive, tmp_path / "file")


def test_no_whole_pictures_and_no_labels_of_ours(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(b"12")
    with pytest.raises(quorate.BadInput, match="no whole pictures"):
        read_binary(tmp_path / "short.bin")
    (tmp_path / "other.bin").write_bytes(b"\xff" * 3073)
    with pytest.raises(quorate.BadInput, match="has a label 255"):
        read_binary(tmp_path / "other.bin")


# ---------------------------------------------------------------- pictures


def test_pictures_are_shifted_and_mirrored_whole() -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (64, 3, 8, 8), dtype=torch.uint8)
    moved = shifted_and_flipped(images, most=2)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for picture, found in enumerate(moved):
        places = [
            (down, right, mirrored)
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
            for piece in [padded[picture, :, down : down + 8, right : right + 8]]
            if torch.equal(found, piece.flip(2) if mirrored else piece)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) > 20  # of 50
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_chance_is_torchs_own() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    torch.manual_seed(5)
    first = shifted_and_flipped(images)
    torch.manual_seed(5)
    assert torch.equal(shifted_and_flipped(images), first)
    assert not torch.equal(shifted_and_flipped(images), first)


def test_standardised() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).repeat(3, 1)[None, :, None, :]
    found = standardised(images, (0.5, 0.0, 1.0), (0.5, 1.0, 0.25))
    assert found.flatten(1).tolist() == [[-1.0, 1.0, 0.0, 1.0, -4.0, 0.0]]


def test_accuracy_and_loss_are_over_all_pictures() -> None:
    scores = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    found = accuracy_and_loss(lambda images: scores[images], torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    assert found["accuracy"] == pytest.approx(2 / 3)
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, 1])).item()
    assert found["test_loss"] == pytest.approx(expected)


# ---------------------------------------------------------------- the task


def test_the_task_learns_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, str(folder))
    task = load_task("cifar10")
    assert isinstance(task, Cifar10)
    result = quorate.train("cifar10", quorate.Delayed(1), quorate.Simulated(2), updates=3, batch_size=10)
    assert set(result.evaluation) == {"accuracy", "test_loss"}
    assert result.metrics.header["task"] == "cifar10"


@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.Delayed(2)], ids=repr)
def test_shifted_pictures_do_not_keep_a_round_from_being_one_batch(folder: Path, policy: quorate.Policy) -> None:
    engine = quorate.Simulated(3, together=True)
    result = quorate.train(Cifar10(data=folder), policy, engine, updates=2, batch_size=8)
    assert result.metrics.header["engine"]["arithmetic"] == "together"


def test_pictures_are_shifted_in_training_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(cifar10, "shifted_and_flipped", lambda images: calls.append(len(images)) or images)
    task = Cifar10(data=folder)
    model = task.model()
    batch = task.train_data()[:6]
    task.loss(model.train(), batch)
    task.loss(model.eval(), batch)
    task.evaluate(model)
    assert calls == [6]
    Cifar10(data=folder, augment=False).loss(model.train(), batch)
    assert calls == [6]


def test_the_schedule_rises_and_falls_to_nothing(folder: Path) -> None:
    task = Cifar10(data=folder, updates=100)
    shares = [task.share_of_lr(version) for version in range(101)]
    assert shares[:3] == pytest.approx([1 / 11, 2 / 11, 3 / 11])
    assert max(shares) == shares[10] == 1.0
    assert shares[55] == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert shares[99] < 0.001 and shares[100] == pytest.approx(0.0)
    assert Cifar10(data=folder).share_of_lr(10**6) == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"net": "resnet"}, "net 'resnet' is not known; choose one of: alexnet, googlenet"),
        ({"precision": "fp8"}, "precision 'fp8' is not known"),
        ({"updates": 0}, "updates is 0, but it must be at least 1"),
        ({"warm_up_share": 1.0}, "warm_up_share is 1.0"),
        ({"train_samples": 1000}, "train_samples is 1000, but there are 200"),
        ({"test_samples": 0}, "test_samples is 0, but it must be at least 1"),
    ],
)
def test_bad_input(folder: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(quorate.BadInput, match=sentence):
        Cifar10(data=folder, **options)
