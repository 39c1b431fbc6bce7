"""What every run of these tests must come to, however it was disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quorate
from quorate.events import Ticket
from quorate.trace import Update
from tests.engines.local.tasks import BATCHES, SAMPLES, Disturbed
from tests.laws.checker import LawChecker

EPOCHS = 3


class Watch(quorate.Recorder):
    """Losses and returns, in the order in which the run hears of them."""

    def __init__(self) -> None:
        self.lost_workers: list[tuple[int, int]] = []  # worker, and how many tickets it had
        self.returned: list[tuple[int, int]] = []  # worker, and its incarnation
        self.updates = 0
        self.on_update: Callable[[int], None] = lambda version: None
        self.on_arrival: Callable[[Ticket], None] = lambda ticket: None

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        self.lost_workers.append((worker, len(tickets)))

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        if incarnation:
            self.returned.append((worker, incarnation))

    def arrived(self, time: float, ticket: Ticket, parts: Any) -> None:
        self.on_arrival(ticket)

    def applied(self, time: float, update: Update) -> None:
        self.updates = update.version
        self.on_update(update.version)


def kill(engine: quorate.Local, *workers: int, number: int = signal.SIGKILL) -> None:
    processes = engine.processes()
    for worker in workers:
        os.kill(processes[worker], number)


def at(version: int, do: Callable[[], None]) -> Callable[[int], None]:
    """Do this once, after that update."""
    done: list[int] = []

    def on_update(made: int) -> None:
        if made >= version and not done:
            done.append(made)
            do()

    return on_update


def train(
    folder: Path,
    task: Any,
    policy: quorate.Policy,
    engine: quorate.Engine,
    watch: quorate.Recorder,
    *,
    epochs: int = EPOCHS,
    **options: Any,
) -> quorate.Result:
    """A run whose every event is held against the laws, whose samples are counted, and which is replayed."""
    laws = LawChecker(policy, engine.workers, BATCHES, epochs)
    result = quorate.train(task, policy, engine, epochs=epochs, out=folder / "run", recorders=(laws, watch), **options)
    check(folder, result, task, epochs)
    return result


def resume(
    folder: Path, task: Any, policy: quorate.Policy, workers: int, *, epochs: int = EPOCHS, **options: Any
) -> quorate.Result:
    """Go on with a run that broke off, to the same proofs; the recorder hears of the past too."""
    laws = LawChecker(policy, workers, BATCHES, epochs)
    result = quorate.resume(folder / "run", task, recorders=(laws,), **options)
    check(folder, result, task, epochs)
    return result


def check(folder: Path, result: quorate.Result, task: Any, epochs: int = EPOCHS) -> None:
    assert result.summary["samples"] == {"applied": epochs * SAMPLES, "distinct": SAMPLES}
    healthy = Disturbed() if isinstance(task, Disturbed) else task
    replayed = quorate.replay(folder / "run", healthy)
    assert replayed.gradients and replayed.result.digest == result.digest is not None


def versions_saved(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (folder / "run" / "checkpoints").iterdir() if entry.name.isdigit())
