"""Run after run, each with a worker killed: the main process has afterwards what it had after the first."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import quorate
from tests.conftest import _children, _without_others
from tests.engines.local.checking import Watch
from tests.engines.local.tasks import Disturbed, Mishap

pytestmark = pytest.mark.processes


def possessions() -> dict[str, Any]:
    """Everything that a run could leave, by kind; descriptors by what they are, since numbers are used again."""
    gc.collect()
    descriptors: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the one that lists the folder
        descriptors[target.split(":")[0] if target.startswith(("socket:", "pipe:")) else target] += 1
    return {
        "descriptors": descriptors,
        "processes": _children(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "shared memory": sorted(_without_others({entry.name for entry in Path("/dev/shm").iterdir()})),
        "mappings": [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line],
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "environment": dict(os.environ),
    }


def run_once(folder: Path) -> None:
    """With everything that opens something: a restart, a checkpoint, a trace, an error now and then."""
    engine, watch = quorate.Local(3), Watch()
    watch.on_update = lambda version: os.kill(engine.processes()[0], signal.SIGKILL) if version == 3 else None
    quorate.train(
        Disturbed(seconds=0.002),
        quorate.BackupSync(2, 1),
        engine,
        epochs=2,
        out=folder / "run",
        checkpoint_every=3,
        recorders=(watch,),
    )
    assert [worker for worker, _ in watch.lost_workers] == [0]


def run_in_vain() -> None:
    """Ends in an error in the middle."""
    try:
        quorate.train(Disturbed(Mishap("forward", "raise")), quorate.FullSync(), quorate.Local(2), epochs=1)
    except quorate.WorkerFailed:
        return
    raise AssertionError("it should have failed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.long)])
def test_the_last_of_many_runs_leaves_what_the_first_did(tmp_path: Path, times: int) -> None:
    before = _children()  # a test before this one may have left Python's own tracker of resources
    run_once(tmp_path / "0")
    first = possessions()
    for number in range(1, times):
        run_once(tmp_path / str(number))
    assert possessions() == first
    assert first["mappings"] == [] and first["processes"] == before


@pytest.mark.usefixtures("warm", "quick_returns")
def test_runs_that_end_in_an_error_leave_nothing_either() -> None:
    before = _children()
    run_in_vain()
    first = possessions()
    for _ in range(4):
        run_in_vain()
    assert possessions() == first
    assert first["mappings"] == [] and first["processes"] == before


def test_what_it_counts_can_be_seen(tmp_path: Path) -> None:
    """The count sees what it should."""
    before = possessions()
    descriptor = os.memfd_create("left")
    assert possessions() != before
    os.close(descriptor)
    assert possessions() == before
