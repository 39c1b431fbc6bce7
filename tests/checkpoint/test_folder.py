"""The folder keeps the right checkpoints, and no checkpoint has its final name before it is on disk."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from quorate.checkpoint import CheckpointFolder
from quorate.errors import BadInput
from tests.checkpoint.states import FILES, flip, made, same, some_state, temporary_folders


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "not" / "there" / "yet")
    assert folder.versions() == []
    for version, left in [(0, [0]), (9, [0, 9]), (10, [9, 10]), (10**8, [10, 10**8]), (10**9, [10**8, 10**9])]:
        folder.save(version, some_state(version))
        assert folder.versions() == left
        assert sorted(entry.name for entry in folder.folder.iterdir()) == sorted(f"{one:08d}" for one in left)
        assert (folder.load().version, folder.load().damaged) == (version, ())
        assert same(folder.load().state, some_state(version))


def test_a_run_that_went_back_leaves_no_higher_version(tmp_path: Path) -> None:
    folder = made(tmp_path, 100, 123)
    flip(folder.folder / "00000123" / "state.json", 5)
    assert folder.load().version == 100
    folder.save(110, some_state(110))
    assert folder.versions() == [100, 110]
    assert folder.load().version == 110


def test_the_same_version_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = made(tmp_path, 4, 5)
    folder.save(5, some_state(55))
    assert folder.versions() == [4, 5]
    assert same(folder.load().state, some_state(55))
    assert temporary_folders(folder) == []


def test_what_else_lies_in_the_folder_is_no_checkpoint(tmp_path: Path) -> None:
    folder = made(tmp_path, 3)
    for name in ("7", "000000007", "0000000x", "-0000001", ".replaced-9-1", ".writing-00000009-1", "٠٠٠٠٠٠٠٩"):
        (folder.folder / name).mkdir()
    (folder.folder / "00000009").write_text("a file")
    assert folder.versions() == [3]
    assert folder.load().version == 3


def test_sweep_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).sweep()
    folder = made(tmp_path, 3, 4)
    for name in (
        ".writing-00000005-77",
        ".removing-00000001-77",
        ".replaced-00000004-77",
        ".removing-.replaced-00000004-7-7",
    ):
        (folder.folder / name).mkdir()
        (folder.folder / name / "state.json").write_text("{}")
    (folder.folder / "00000003").rename(
        folder.folder / ".replaced-00000003-77"
    )  # killed before the new one was published
    assert folder.versions() == [3, 4]
    folder.sweep()
    assert sorted(entry.name for entry in folder.folder.iterdir()) == ["00000003", "00000004"]
    assert same(folder.load().state, some_state(4))


def test_leftovers_of_a_process_with_the_same_number_are_no_obstacle(tmp_path: Path) -> None:
    """In a container the training process may have the same pid at each start."""
    folder = made(tmp_path, 3, 4)
    for name in (
        "writing-00000005",
        "removing-00000003",
        "removing-00000004",
        "replaced-00000004",
        "replaced-00000005",
    ):
        shutil.copytree(folder.folder / "00000003", folder.folder / f".{name}-{os.getpid()}")
    folder.save(5, some_state(5))
    assert same(folder.load().state, some_state(5))
    shutil.copytree(folder.folder / "00000004", folder.folder / f".replaced-00000005-{os.getpid()}")
    folder.save(5, some_state(55))
    assert same(folder.load().state, some_state(55))
    assert folder.versions() == [4, 5]
    assert not (folder.folder / "00000003").exists()


def test_all_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can cut the power; this test checks the order of writes and fsyncs that survives a power cut."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        content = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else path.stat().st_size
        steps.append(f"{path.relative_to(tmp_path)} {content}")

    def noted_replace(old: Path, new: Path) -> None:
        replace(old, new)
        steps.append(f"{old.name} becomes {new.name}")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "getpid", lambda: 77)
    saved = made(tmp_path / "run", 1).folder / "00000001"
    sizes = {name: (saved / name).stat().st_size for name in FILES}
    writing = "run/checkpoints/.writing-00000001-77"
    assert steps == [
        "run ['checkpoints']",
        f"{writing}/state.json {sizes['state.json']}",
        f"{writing}/tensors.safetensors {sizes['tensors.safetensors']}",
        f"{writing}/manifest.json {sizes['manifest.json']}",
        f"{writing} {sorted(FILES)}",
        ".writing-00000001-77 becomes 00000001",
        "run/checkpoints ['00000001']",
    ]
    made(tmp_path / "run", 2)
    steps.clear()
    made(tmp_path / "run", 3)
    assert steps[-2:] == [
        "run/checkpoints ['00000001', '00000002', '00000003']",
        "00000001 becomes .removing-00000001-77",
    ]


def test_all_files_have_the_mode_that_umask_asks_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved = made(tmp_path, 1).folder / "00000001"
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in saved.iterdir()} == dict.fromkeys(FILES, "0o640")


@pytest.mark.parametrize("module", ["safetensors", "numpy"])
def test_a_missing_library_gives_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    folder = made(tmp_path, 1)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    sentence = f"checkpoints need {module}, which is not installed; type: pip install {module}"
    with pytest.raises(BadInput, match=sentence):
        folder.save(2, {})
    with pytest.raises(BadInput, match=sentence):
        folder.load()
    assert folder.versions() == [1] and temporary_folders(folder) == []
