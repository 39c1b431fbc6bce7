"""Somebody kills a random worker every second. The laws hold, no sample is lost, and it learns as well as ever."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quorate
from tests.engines.local.checking import Watch
from tests.laws.checker import LawChecker

pytestmark = pytest.mark.processes

DIGITS_SAMPLES, DIGITS_BATCHES = 1438, 90


@contextmanager
def killer(engine: quorate.Local, every_s: float, seed: int) -> Iterator[list[int]]:
    """Kills a random worker every so often from a thread of its own; gives the list of those it has killed."""
    killed: list[int] = []
    over, draws = threading.Event(), random.Random(seed)

    def work() -> None:
        while not over.wait(every_s):
            opened = engine._open
            processes = {} if opened is None else opened.workers.pids()
            if processes:
                worker = draws.choice(sorted(processes))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes[worker], signal.SIGKILL)
                    killed.append(worker)

    thread = threading.Thread(target=work, name="killer")
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def chaos(
    folder: Path, policy: quorate.Policy, workers: int, latency: str, epochs: int, every_s: float
) -> tuple[int, int, quorate.Result]:
    """How many were killed, how many of these the run has seen, and what it came to."""
    engine, watch, blocks = quorate.Local(workers, latency=latency), Watch(), [0]
    watch.on_update = lambda version: blocks.append(engine._open._store._blocks.count)
    laws = LawChecker(policy, workers, DIGITS_BATCHES, epochs)
    with killer(engine, every_s, seed=5) as killed:
        result = quorate.train("digits", policy, engine, epochs=epochs, out=folder / "run", recorders=(laws, watch))
    assert result.summary["samples"] == {"applied": epochs * DIGITS_SAMPLES, "distinct": DIGITS_SAMPLES}
    # One killed while it starts is not missed; one killed at the very end neither.
    assert len(killed) * 0.8 - 1 <= len(watch.lost_workers) <= len(killed)
    assert max(incarnation for _, incarnation in watch.returned) >= 1
    # Each worker reads a version and writes up to three gradients: one, and two that it has not yet noticed are over.
    assert max(blocks) <= 4 * workers + 2, "the blocks of the dead are not given back"
    return len(killed), len(watch.lost_workers), result


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "policy",
    [quorate.BackupSync(3, 1), pytest.param(quorate.Async(max_staleness=4), marks=pytest.mark.long)],
    ids=repr,
)
def test_five_seconds_of_chaos(tmp_path: Path, policy: quorate.Policy) -> None:
    killed, _, result = chaos(tmp_path, policy, 4, "shifted-exp:0.010,0.005", 8, every_s=0.25)
    assert killed >= 5
    assert quorate.replay(tmp_path / "run").result.digest == result.digest
    if policy.name == "backup":  # the learning rate is one for synchronous updates
        assert result.evaluation["accuracy"] > 0.5


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("quorum", "backups", "epochs"), [(3, 1, 70), (6, 2, 140)])
def test_minutes_of_chaos(tmp_path: Path, quorum: int, backups: int, epochs: int) -> None:
    policy, workers, latency = quorate.BackupSync(quorum, backups), quorum + backups, "shifted-exp:0.012,0.004"
    killed, _, result = chaos(tmp_path, policy, workers, latency, epochs, every_s=1.0)
    assert result.summary["updates"] >= 2000 and killed >= 25
    assert quorate.replay(tmp_path / "run").result.digest == result.digest
    undisturbed = quorate.train("digits", policy, quorate.Local(workers), epochs=epochs)
    assert abs(result.evaluation["accuracy"] - undisturbed.evaluation["accuracy"]) <= 0.02
