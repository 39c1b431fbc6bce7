"""Runs the cells of the kill matrix, a few at a time: `python -m tests.engines.local.kill_matrix_run FOLDER`.

Each life of a run is a process forked from this one, since many of them will die and none should have to import torch
first. What came of a cell is in FOLDER/<cell>/report.json as soon as it is known; the tests wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import torch

import quorate
import quorate.checkpoint
from quorate.checkpoint import CheckpointFolder
from quorate.engines.local import fork_server
from quorate.engines.local.fork_server import end_with_parent
from quorate.trace import Recorder, TraceWriter, Update, feed
from tests.engines.local.tasks import BATCHES, Disturbed, Mark, Mishap
from tests.engines.local.warm_fork_server import WARM
from tests.laws.checker import LawChecker

WORKERS, EPOCHS = 4, 5
POLICIES = {
    "full": quorate.FullSync(),
    "backup": quorate.BackupSync(3, 1),
    "async": quorate.Async(),
    "soft": quorate.SoftSync(2),
    "bounded": quorate.BoundedStaleness(1),
    "delayed": quorate.Delayed(1),
}
#: Steps of writing a checkpoint: whose function, its name, and whether this call of it is the one that is meant.
STEPS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "trace to disk": (TraceWriter, "sync", lambda trace: True),
    "folder": (quorate.checkpoint, "_make_folders", lambda folder, *_: True),
    "state": (quorate.checkpoint, "_write_bytes", lambda file, data, *_: file.name == "state.json"),
    "tensors": (quorate.checkpoint, "store", lambda file, tensors: True),
    "tensors to disk": (quorate.checkpoint, "_fsync", lambda path, *_: path.name == "tensors.safetensors"),
    "manifest": (quorate.checkpoint, "_write_bytes", lambda file, data, *_: file.name == "manifest.json"),
    "folder to disk": (quorate.checkpoint, "_fsync", lambda path, *_: path.name.startswith(".writing")),
    "publish": (quorate.checkpoint, "_rename", lambda old, new: old.name.startswith(".writing")),
    "name to disk": (quorate.checkpoint, "_fsync", lambda path, *_: path.name == "checkpoints"),
    "retire": (quorate.checkpoint, "_rename", lambda old, new: new.name.startswith(".removing")),
    "delete": (quorate.checkpoint, "_remove_tree", lambda tree: tree.name.startswith(".removing") and tree.exists()),
}
LIMIT_S = 60.0  # for one life; a run takes two seconds
PAUSE_S = 0.3


# ------------------------------------------------------------ one life of a run


def live(cell: dict[str, Any], folder: Path, number: int) -> None:
    """Train, or go on after a death; with the mishap of this life, if there is one left."""
    warnings.filterwarnings("ignore", r"worker \d+ (was killed|ended|failed|hung)", RuntimeWarning)
    policy, out = POLICIES[cell["policy"]], folder / "run"
    task = Disturbed(seconds=0.002, load_s=0.0003)
    if number < len(cell["lives"]):
        where, what = cell["lives"][number]
        mishap = Mishap(
            where,
            what,
            str(folder / f"mark{number}"),
            sample=42 if cell["victim"] == "worker" and where != "prefetch" else None,
            victim=os.getpid() if cell["victim"] == "main" and where != "apply" else None,
            after=f"{out}/checkpoints/0*" if cell["victim"] == "main" and where != "start" else None,
        )
        if where in STEPS:
            _spoil(where, mishap)
        task = Disturbed(mishap, seconds=0.002, load_s=0.0003)
    often = 2 if cell["victim"] == "main" else None
    laws = LawChecker(policy, WORKERS, BATCHES, EPOCHS)
    watchers = (laws, _Patient(out / "checkpoints", often)) if often and number == 0 else (laws,)
    if number == 0:
        engine = quorate.Local(WORKERS)
        result = quorate.train(task, policy, engine, epochs=EPOCHS, out=out, checkpoint_every=often, recorders=watchers)
    else:
        result = quorate.resume(out, task, checkpoint_every=often, recorders=watchers)
    replayed = quorate.replay(out, Disturbed())
    trace = list(quorate.read_trace(out))
    feed(trace, LawChecker(policy, WORKERS, BATCHES, EPOCHS))
    finished = {
        "samples": result.summary["samples"],
        "digest": result.digest,
        "replayed": replayed.result.digest if replayed.gradients else None,
        **_lives(trace),
    }
    (folder / "finished.json").write_text(json.dumps(finished))


class _Patient(Recorder):
    """Lets a run wait for its first checkpoint, which faults wait for: it is so short that a disk may be slower."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every

    def applied(self, time: float, update: Update) -> None:
        if update.version == self.every + 1:
            while not any(self.folder.glob("0*")):
                sleep(0.001)


def _spoil(step: str, mishap: Mishap) -> None:
    """Let the mishap happen at this step of the third checkpoint, when there are two to fall back to."""
    owner, name, meant = STEPS[step]
    real, passed = getattr(owner, name), [0]

    def spoilt(*arguments: Any) -> Any:
        if meant(*arguments):
            passed[0] += 1
            if passed[0] >= (1 if name in ("_remove_tree",) or step == "retire" else 3):
                mishap.meet(step)
        return real(*arguments)

    setattr(owner, name, spoilt)


def _lives(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """What a trace says of losses and returns."""
    resumes = [place for place, record in enumerate(trace) if record["event"] == "resume"]
    begun = {record["ticket"]: record["time"] for record in trace if record["event"] == "start"}
    return {
        "lost": sum(
            record["event"] == "lost" and not any(trace[place]["time"] == record["time"] for place in resumes)
            for record in trace
        ),
        "returned": [
            [one["worker"], one["incarnation"]] for one in trace if one["event"] == "join" and one["incarnation"]
        ],
        "resumed_at": [trace[place]["version"] for place in resumes],
        "slowest_s": max(one["time"] - begun[one["ticket"]] for one in trace if one["event"] == "arrive"),
        "updates": max(record["version"] for record in trace if record["event"] == "apply"),
    }


# ------------------------------------------------------------ many lives


class Bout:
    """One cell, from its first life to its report."""

    def __init__(self, cell: dict[str, Any], folder: Path) -> None:
        self.cell, self.folder = cell, folder / cell["name"]
        self.folder.mkdir()
        self.deaths: list[int] = []
        self.stops = 0
        self.checkpoints: list[list[int]] = []
        self.left: list[int] = []
        self.over = False
        self.pid = self._fork()

    def _fork(self) -> int:
        self.until = time.monotonic() + LIMIT_S
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            end_with_parent()
            output = os.open(self.folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)  # whatever it starts can be told by that
            fork_server.subprocess = WARM
            live(self.cell, self.folder, len(self.deaths))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def look(self) -> None:
        """Let it go on: continue it if it was stopped, give it another life if it died."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if time.monotonic() > self.until:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._report("it hangs")
        elif pid == 0:
            return
        elif os.WIFSTOPPED(status):
            self.stops += 1
            sleep(PAUSE_S)
            os.kill(pid, signal.SIGCONT)
        else:
            code = os.waitstatus_to_exitcode(status)
            self.left += _processes_left(self.folder)
            if code == 0 or len(self.deaths) >= len(self.cell["lives"]):
                self._report(None if code == 0 else f"the last life ended with {code}")
                return
            self.deaths.append(code)
            self.checkpoints.append(CheckpointFolder(self.folder / "run").versions())
            self.pid = self._fork()

    def _report(self, error: str | None) -> None:
        self.over = True
        finished, output = self.folder / "finished.json", self.folder / "output.txt"
        report = {
            "error": error,
            "output": output.read_text() if output.exists() else "",
            "deaths": self.deaths,
            "stops": self.stops,
            "checkpoints": self.checkpoints,
            "left": self.left,
            "marks": [bool(Mark(self.folder / f"mark{number}")) for number in range(len(self.cell["lives"]))],
            **(json.loads(finished.read_text()) if finished.exists() else {}),
        }
        temporary = self.folder / "report.tmp"
        temporary.write_text(json.dumps(report))
        temporary.rename(self.folder / "report.json")


def _processes_left(folder: Path) -> list[int]:
    """Processes of a cell that do not end although its main process has; they get some seconds."""
    until = time.monotonic() + 5
    while (found := processes_in(folder)) and time.monotonic() < until:
        sleep(0.01)
    return found


def processes_in(folder: Path) -> list[int]:
    """The processes whose working directory this is."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink() == folder:
                found.append(int(place.name))
    return found


def main(folder: Path) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    quorate.train(Disturbed(), quorate.FullSync(), quorate.Simulated(1), updates=1)  # torch imports more when used
    waiting = deque(json.loads((folder / "cells.json").read_text()))
    bouts: list[Bout] = []
    while waiting or bouts:
        while waiting and len(bouts) < min(4, len(os.sched_getaffinity(0))):
            bouts.append(Bout(waiting.popleft(), folder))
        for bout in bouts:
            bout.look()
        bouts = [bout for bout in bouts if not bout.over]
        sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
