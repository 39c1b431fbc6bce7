"""Checkpoints written while training goes on, or left to the kernel."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from quorate.checkpoint import BackgroundWriter, CheckpointFolder, Damaged, state_in
from quorate.errors import BadInput
from tests.checkpoint.states import made, same, some_state

# ------------------------------------------------------------ in the background


class SlowFolder(CheckpointFolder):
    """A folder that saves only when the test lets it; it raises `fault` instead if there is one."""

    def __init__(self, run: Path, fault: BaseException | None = None) -> None:
        super().__init__(run)
        self.go = threading.Event()
        self.fault = fault

    def save(self, version: int, state: dict[str, Any]) -> Path:
        assert self.go.wait(60)
        if self.fault is not None:
            raise self.fault
        return super().save(version, state)


def unexpected(sentence: str) -> None:
    raise AssertionError(sentence)


def test_the_writer_is_busy_until_the_checkpoint_is_on_disk(tmp_path: Path) -> None:
    folder, saved = SlowFolder(tmp_path), []
    writer = BackgroundWriter(folder, unexpected, saved.append)
    assert not writer.busy
    writer.submit(1, some_state(1))
    assert writer.busy and saved == []
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]
    assert not thread.daemon
    with pytest.raises(AssertionError, match="one checkpoint at a time"):
        writer.submit(2, some_state(2))
    folder.go.set()
    writer.finish()
    writer.finish()
    assert not writer.busy and not thread.is_alive() and saved == [1]
    writer.submit(2, some_state(2))
    while writer.busy:
        thread.join(0.01)
    writer.submit(3, some_state(3))  # without a finish between
    writer.finish()
    assert saved == [1, 2, 3]
    assert same(folder.load().state, some_state(3))


def test_a_disk_that_refuses_is_a_sentence_and_training_goes_on(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder, sentences = SlowFolder(tmp_path, full), []
    folder.go.set()
    writer = BackgroundWriter(folder, sentences.append, lambda version: unexpected(f"saved {version}"))
    writer.submit(7, {})
    writer.finish()
    made(tmp_path, 100)
    writer.submit(123, {})
    writer.finish()
    assert sentences == [
        "checkpoint of version 7 could not be written: No space left on device; training goes on, "
        "there is none before it",
        "checkpoint of version 123 could not be written: No space left on device; training goes on, "
        "the last one is version 100",
    ]


def test_any_other_fault_surfaces_once(tmp_path: Path) -> None:
    writer = BackgroundWriter(CheckpointFolder(tmp_path), unexpected)
    writer.submit(1, {"bad": {1, 2}})
    with pytest.raises(BadInput, match="bad is a set"):
        writer.finish()
    writer.finish()
    writer.submit(1, {"bad": {1, 2}})
    while writer.busy:
        threading.Event().wait(0.01)
    with pytest.raises(BadInput, match="bad is a set"):
        writer.submit(2, {})
    assert not writer.busy and CheckpointFolder(tmp_path).versions() == []
    writer = BackgroundWriter(CheckpointFolder(tmp_path), unexpected, lambda version: unexpected("no one listens"))
    writer.submit(3, {})
    with pytest.raises(AssertionError, match="no one listens"):
        writer.finish()


# ------------------------------------------------------------ left to the kernel


def test_what_is_left_to_the_kernel_waits_for_no_disk_and_a_durable_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, 1, 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("it waited for the disk"))
    for version in (3, 4, 5):
        folder.save(version, some_state(version), durable=False)
    assert folder.versions() == [2, 4, 5]
    assert same(folder.load().state, some_state(5))
    monkeypatch.undo()
    folder.save(6, some_state(6))
    assert folder.versions() == [5, 6]
    folder.save(4, some_state(4), durable=False)  # the run went back, so newer checkpoints must go
    assert folder.versions() == [4]


def test_the_files_of_one_can_be_sent_elsewhere(tmp_path: Path) -> None:
    folder = made(tmp_path, 1, 2)
    assert same(state_in(folder.content(1)), some_state(1))
    tensors = folder.folder / "00000002" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"tensors\.safetensors: it has \d+ bytes instead of"):
        folder.content(2)
    with pytest.raises(Damaged, match=r"manifest\.json: it is missing"):
        folder.content(3)
