"""After a full disk or a kill at any step, the old or the new checkpoint is complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quorate.checkpoint import CheckpointFolder
from tests.checkpoint.states import made, same, some_state, temporary_folders

# ------------------------------------------------------------ a disk that refuses


class Disk:
    """Makes one write call fail with "No space left", or that call and all later ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int, *, for_good: bool) -> None:
        self.calls: list[str] = []
        self.failing, self.for_good = failing, for_good
        import safetensors.torch

        for owner, name in [
            *((os, "mkdir"), (os, "fsync"), (os, "replace"), (Path, "write_bytes")),
            (safetensors.torch, "save_file"),
        ]:
            monkeypatch.setattr(owner, name, self.spoilt(name, getattr(owner, name)))

    def spoilt(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            here = len(self.calls) - 1
            if here == self.failing or (self.for_good and here > self.failing):
                if name == "write_bytes":  # half of the data fits
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if name == "save_file":
                    arguments[1].write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call


def fault_of(work: Callable[[], object]) -> OSError | None:
    try:
        work()
    except OSError as fault:
        return fault
    return None


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("version", [4, 5])  # 5 replaces the newest
def test_a_failure_at_any_step_leaves_the_old_checkpoint(tmp_path: Path, version: int, for_good: bool) -> None:
    folder = made(tmp_path, 2, version - 1 if version == 4 else 5)
    old = folder.load()
    failures = []
    for failing in range(100):
        with pytest.MonkeyPatch.context() as patched:
            disk = Disk(patched, failing, for_good=for_good)
            fault = fault_of(lambda: folder.save(version, some_state(44)))
        if fault is None:
            break
        assert fault.errno == errno.ENOSPC
        failures.append(disk.calls[failing])
        if not for_good or "replace" not in disk.calls:
            assert temporary_folders(folder) == []
        loaded = folder.load()
        assert loaded.damaged == ()
        # If the disk fails for good just after the rename, the rename cannot be undone.
        undone = loaded.version == old.version and same(loaded.state, old.state)
        assert undone or (for_good and failures[-1] == "fsync" and same(loaded.state, some_state(44)))
        folder.sweep()
        assert temporary_folders(folder) == []
        assert same(folder.load().state, loaded.state)
        if undone:
            assert folder.versions() == [2, old.version]
    assert {"mkdir", "write_bytes", "save_file", "fsync", "replace"} <= set(failures)
    # Only the removal of an old checkpoint fails now; the new checkpoint is sound.
    assert same(folder.load().state, some_state(44))
    folder.sweep()
    assert temporary_folders(folder) == []


FULL_DISK = """
import json, os, sys
from pathlib import Path
import torch
from quorate.checkpoint import BackgroundWriter, CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]))
report = {"sentences": [], "errors": [], "versions": []}
folder.save(1, {"weight": torch.ones(100)})
for state in ({"weight": torch.ones(1_000_000)}, {"text": "x" * 3_000_000}):
    try:
        folder.save(2, state)
    except OSError as fault:
        report["errors"].append(fault.errno)
    writer = BackgroundWriter(folder, report["sentences"].append, report["versions"].append)
    writer.submit(2, state)
    writer.finish()
    assert folder.load().version == 1 and folder.load().state["weight"].sum() == 100
report["left"] = sorted(os.listdir(folder.folder))
writer.submit(3, {"small": "again"})
writer.finish()
report["newest"] = folder.load().version
print(json.dumps(report))
"""
IN_A_TINY_FILE_SYSTEM = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; exec "$2" -W error -c "$3" "$1"'


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a tiny file system")
    command = ["unshare", "-m", "sh", "-c", IN_A_TINY_FILE_SYSTEM, "sh", str(tmp_path), sys.executable, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine does not let root mount a tiny file system")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "errors": [errno.ENOSPC] * 2,
        "sentences": [
            "checkpoint of version 2 could not be written: No space left on device; "
            "training goes on, the last one is version 1"
        ]
        * 2,
        "left": ["00000001"],
        "versions": [3],
        "newest": 3,
    }


# ------------------------------------------------------------ a process that is killed

KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import safetensors.torch
import torch
from quorate.checkpoint import CheckpointFolder
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # a kill, unlike a power cut, loses nothing in the kernel's cache

place, version, state = Path(sys.argv[1]), int(sys.argv[2]), {"weight": torch.full((50,), 2.0), "new": (True,)}
STEPS = [(os, "mkdir"), (os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "chmod"),
         (Path, "write_bytes"), (safetensors.torch, "save_file")]

def save_and_die(run, fatal, moment):
    calls = []
    def deadly(name, real):
        def call(*arguments, **options):
            number = len(calls)
            calls.append(name)
            if number != fatal:
                return real(*arguments, **options)
            if moment == "after":
                real(*arguments, **options)
            if moment == "amid" and name == "write_bytes":
                real(arguments[0], arguments[1][:len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call
    for owner, name in STEPS:
        setattr(owner, name, deadly(name, getattr(owner, name)))
    CheckpointFolder(run).save(version, state)
    return calls

def in_a_child(work):
    child = os.fork()  # a fork, because a new process would import torch
    if child == 0:
        try:
            work()
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

reading, writing = os.pipe()
shutil.copytree(place / "template", place / "all")
in_a_child(lambda: os.write(writing, json.dumps(save_and_die(place / "all", None, None)).encode()))
steps = json.loads(os.read(reading, 100_000))
report = []
for number, step in enumerate(steps):
    for moment in ("before", "amid", "after") if step == "write_bytes" else ("before", "after"):
        run = place / f"{number}-{step}-{moment}"
        shutil.copytree(place / "template", run)
        report.append([run.name, in_a_child(lambda: save_and_die(run, number, moment))])
print(json.dumps(report))
"""


@pytest.mark.parametrize(("existing", "version"), [([2, 3], 4), ([3], 3)], ids=["next", "replaced"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_one_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: list[int], version: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    old, new = made(tmp_path / "template", *existing).load(), {"weight": torch.full((50,), 2.0), "new": (True,)}
    command = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path), str(version)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    deaths = json.loads(done.stdout)
    outcomes = []
    for name, status in deaths:
        assert status == -signal.SIGKILL, name
        folder = CheckpointFolder(tmp_path / name)
        loaded = folder.load()
        assert loaded.damaged == ()
        is_old = loaded.version == old.version and same(loaded.state, old.state)
        is_new = loaded.version == version and same(loaded.state, new)
        assert is_old != is_new, name
        outcomes.append("old" if is_old else "new")
        again = shutil.copytree(tmp_path / name, tmp_path / f"{name}-again")
        folder.sweep()
        assert temporary_folders(folder) == [], name
        assert same(folder.load().state, loaded.state), name
        unswept = CheckpointFolder(again)
        unswept.save(version, some_state(9))
        assert same(unswept.load().state, some_state(9)), name
    changes = outcomes.index("new")
    assert outcomes == ["old"] * changes + ["new"] * (len(outcomes) - changes)
    assert deaths[changes][0].endswith("-replace-after")
    steps = {name.split("-")[1] for name, _ in deaths}
    assert steps == {"mkdir", "write_bytes", "save_file", "chmod", "fsync", "replace", "unlink", "rmdir"}
