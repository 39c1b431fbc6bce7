"""The kill matrix: every fault, to a worker or to the main process, at every point of the protocol.

Each cell proves that its fault happened, and that the run then came to a right end: the laws hold over its whole trace,
every sample was applied exactly once an epoch, and a replay computes the same parameters to the last bit.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.engines.local.kill_matrix_run import BATCHES, EPOCHS, PAUSE_S, STEPS
from tests.engines.local.tasks import SAMPLES

POINTS = ["load", "prefetch", "forward", "backward", "answer"]
DEATHS = {"kill": -signal.SIGKILL, "segv": -signal.SIGSEGV, "raise": 1}
ROTATION = ["backup", "async", "full", "soft", "delayed", "bounded"]


def worker_cells() -> list[dict[str, Any]]:
    """A worker is hit. One that is stopped is only missed where the round needs it."""
    cells = []
    for where in ["start", *POINTS]:
        for what in ["kill", "segv", "raise", "stop", "pause"]:
            if (where, what) == ("start", "stop"):
                continue  # see test_silence
            policy = "full" if what in ("stop", "pause") else ROTATION[len(cells) % len(ROTATION)]
            cells.append({"name": f"worker-{where}-{what}", "policy": policy, "lives": [(where, what)]})
    return [{**cell, "victim": "worker"} for cell in cells]


def main_cells() -> list[dict[str, Any]]:
    """The main process is hit, while a worker is at that point or at its own. An exception there is not its own."""
    pairs = [(where, what) for where in POINTS for what in ("kill", "segv", "pause")]
    pairs += [("start", "kill")]
    pairs += [("apply", what) for what in ("kill", "segv", "raise", "pause")]
    pairs += [(step, "kill") for step in STEPS]
    pairs += [(step, what) for step in ("tensors", "publish", "delete") for what in ("segv", "pause")]
    pairs += [(step, "raise") for step in ("tensors", "publish")]
    cells = [{"name": f"main-{where}-{what}".replace(" ", "_"), "lives": [(where, what)]} for where, what in pairs]
    cells.append({"name": "main-twice", "lives": [("apply", "kill"), ("publish", "kill"), ("backward", "segv")]})
    for number, cell in enumerate(cells):
        cell |= {"victim": "main", "policy": ROTATION[number % len(ROTATION)]}
    return cells


def matrix(cells: list[dict[str, Any]]) -> list[Any]:
    """The cells; a crash is to everybody else what a kill is, so one for each victim is enough for every day."""
    crashes = [cell for cell in cells if cell["name"].endswith("segv")]
    return [pytest.param(cell, marks=pytest.mark.long if cell in crashes[1:] else ()) for cell in cells]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """What came of a cell. All that were selected run in the background, in the order in which they are asked for."""
    folder = tmp_path_factory.mktemp("arena")
    chosen = [item.callspec.params["cell"] for item in request.session.items if item.module is request.module]
    (folder / "cells.json").write_text(json.dumps(chosen))
    command = [sys.executable, "-W", "error", "-m", "tests.engines.local.kill_matrix_run", str(folder)]
    with (folder / "log").open("wb") as log:
        arena = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(name: str) -> Any:
        while not (folder / name / "report.json").exists():
            assert arena.poll() is None, (folder / "log").read_text()
            time.sleep(0.02)
        found = json.loads((folder / name / "report.json").read_text())
        assert found["error"] is None, f"{found['error']}\n{found['output']}"
        return found

    yield wait
    arena.kill()
    arena.wait()


def check_end(found: dict[str, Any]) -> None:
    assert found["marks"] == [True] * len(found["marks"]), "the fault did not happen"
    assert found["samples"] == {"applied": EPOCHS * SAMPLES, "distinct": SAMPLES}
    assert found["digest"] == found["replayed"] is not None
    assert found["left"] == [], "processes outlive their run"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("cell", matrix(worker_cells()), ids=lambda cell: cell["name"])
def test_a_worker_is_hit(cell: dict[str, Any], report: Callable[[str], Any]) -> None:
    found = report(cell["name"])
    where, what = cell["lives"][0]
    check_end(found)
    assert found["deaths"] == [] and found["resumed_at"] == []
    if where == "start":
        assert found["lost"] == 0  # it was there in time for the first ticket
    elif what == "pause":
        # What is loaded ahead may be loaded while its worker waits for the others: the pause then delays nobody.
        assert found["slowest_s"] > 0.1 or found["lost"] == 1 or where == "prefetch"
    elif (where, what) == ("prefetch", "raise"):
        assert found["lost"] <= 1  # the error is told to whoever asks for the batch, and that may be another worker
    else:
        assert found["lost"] == 1
        if cell["policy"] == "full":
            assert [incarnation for _, incarnation in found["returned"]] == [1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("cell", matrix(main_cells()), ids=lambda cell: cell["name"])
def test_the_main_process_is_hit(cell: dict[str, Any], report: Callable[[str], Any]) -> None:
    if cell["name"] == "main-start-kill":
        with pytest.raises(AssertionError, match=r"BadInput: trace .* does not exist") as failed:
            report(cell["name"])
        assert "the last life ended with 1" in str(failed.value)
        return
    found = report(cell["name"])
    check_end(found)
    faults = [what for _, what in cell["lives"]]
    assert found["deaths"] == [DEATHS[what] for what in faults if what != "pause"]
    assert found["stops"] == faults.count("pause")
    if "pause" in faults:
        assert found["slowest_s"] > PAUSE_S or cell["lives"][0][0] not in POINTS
        return
    # A life that died before its first checkpoint is cut off the trace, and goes back to where it began.
    resumed_at = [versions[-1] for versions in found["checkpoints"]]
    assert min(resumed_at) > 0 and found["resumed_at"] == sorted(set(resumed_at))
    assert found["updates"] <= EPOCHS * BATCHES
    if faults == ["raise"]:
        assert "ArithmeticError: a mishap" in found["output"]
