"""Processes that are played by a test: they do what `DataParallel` does, in an order that is drawn, without tensors.

The coordinator runs in its thread as always. So messages and decisions cross each other, as on a network.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from quorate.data_parallel.control.hub import Inbox
from quorate.data_parallel.coordinator_thread import CoordinatorThread

LONG_S = 30.0  # what is there at once
_MOMENT_S = 0.0005


class PlayedHub:
    """What a coordinator needs of a hub."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.inbox: Inbox = SimpleQueue()
        self.told: list[SimpleQueue[dict[str, Any]]] = [SimpleQueue() for _ in range(workers)]
        self.lost: list[tuple[int, str]] = []

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        self.told[worker].put(message)

    def broadcast(self, message: dict[str, Any]) -> None:
        for worker in range(self.workers):
            self.tell(worker, message)

    def lose(self, worker: int, why: str) -> None:
        self.lost.append((worker, why))

    def say(self, worker: int, kind: str, **fields: Any) -> None:
        self.inbox.put((monotonic(), worker, {"kind": kind, **fields}))


@dataclass
class Process:
    """One process of a decided run."""

    worker: int
    batches: int  # how many it has left
    reading: int = 0
    newest: int = 0
    offered: bool = False  # it waits to hear whether its gradient counts
    computes: bool = False
    has_finished: bool = False
    over: str | None = None


class Decided:
    """Plays backups and deadlines until all is over; `offers` and `members` are the truth of what made a version."""

    def __init__(
        self,
        hub: PlayedHub,
        coordinator: CoordinatorThread,
        batches: list[int],
        *,
        seed: int,
        finishes_late: bool = False,
        slow: tuple[int, ...] = (),
        first_version: int = 0,
        nan_every: int = 0,
    ) -> None:
        self.hub, self.coordinator = hub, coordinator
        self.random = random.Random(seed)
        self.processes = [Process(worker, count, first_version, first_version) for worker, count in enumerate(batches)]
        self.finishes_late, self.slow, self.nan_every = finishes_late, slow, nan_every
        self.offers: dict[int, set[int]] = {}  # version -> workers that had a gradient of it
        self.members: dict[int, list[int]] = {}  # version -> workers whose gradients made it
        self.steps = 0

    def play(self) -> None:
        until = monotonic() + LONG_S
        while not all(process.has_finished and process.over for process in self.processes):
            assert not self.hub.lost, self.hub.lost
            assert monotonic() < until, f"nobody goes on: {self.processes}"
            process = self.random.choice(self.processes)
            if process.worker in self.slow and self.random.random() < 0.9:
                continue
            self._hear(process)
            self._go_on(process)

    def _hear(self, process: Process) -> None:
        waits = process.offered or process.has_finished
        while True:
            try:
                message = self.hub.told[process.worker].get(timeout=_MOMENT_S if waits else 0)
            except Empty:
                return
            waits = False
            kind = message["kind"]
            if kind == "go":
                self._decided(process, message)
            elif kind == "over":
                process.over = message["reason"]

    def _decided(self, process: Process, go: dict[str, Any]) -> None:
        version, members = go["version"], go["members"]
        process.newest = version
        if process.worker == 0:  # its data plane has made it
            assert version not in self.members
            self.members[version] = members
            self.coordinator.version_made(version, 0.001)

    def _go_on(self, process: Process) -> None:
        if process.has_finished:
            return
        if process.over:
            self._finish(process)
        elif process.offered:
            if process.newest > process.reading:
                self._end_iteration(process)
        elif process.computes:
            self._step(process)
        else:
            self._begin(process)

    def _begin(self, process: Process) -> None:
        if process.batches == 0:
            self._finish(process)
            return
        process.reading = process.newest
        process.computes = True
        self.hub.say(process.worker, "began", version=process.reading)

    def _step(self, process: Process) -> None:
        self.steps += 1
        parts = {"data_s": 0.0, "compute_s": 0.001, "transfer_s": 0.0}
        late = process.newest > process.reading
        if self.nan_every and self.steps % self.nan_every == 0 and not late:
            self.hub.say(process.worker, "refused", version=process.reading)
            self._end_iteration(process)
            return
        if late and not self.finishes_late:
            self.hub.say(process.worker, "abandoned", version=process.reading, **parts)
            self._end_iteration(process)
            return
        self.offers.setdefault(process.reading, set()).add(process.worker)
        self.hub.say(process.worker, "arrived", version=process.reading, **parts)
        process.offered = True

    def _end_iteration(self, process: Process) -> None:
        process.offered = process.computes = False
        process.batches -= 1

    def _finish(self, process: Process) -> None:
        process.has_finished = True
        self.hub.say(process.worker, "finished")


def play_free_running(
    hub: PlayedHub, coordinator: CoordinatorThread, counts: list[int], delay: int, seed: int, *, made: bool = True,
    sits_out: Callable[[int, int], bool] = lambda worker, round: False,
) -> None:  # fmt: skip
    """Every process is in every round; what they say comes in an order that is drawn, each one's in its own."""
    draw = random.Random(seed)
    workers = len(counts)
    nexts, version, said = [0] * workers, 0, [deque[tuple[str, int]]() for _ in range(workers)]
    finished = [False] * workers
    while not all(finished) or any(said):
        worker = draw.randrange(workers)
        if draw.random() < 0.5 and said[worker]:
            kind, number = said[worker].popleft()
            hub.say(worker, kind, **({"version": number, "compute_s": 0.001} if kind == "arrived" else {}))
            continue
        if finished[worker]:
            continue
        if nexts[worker] == counts[worker] or version >= min(counts):
            finished[worker] = True
            said[worker].append(("finished", 0))
        elif nexts[worker] <= version + delay:
            if not sits_out(worker, nexts[worker]):
                said[worker].append(("arrived", nexts[worker]))
            nexts[worker] += 1
        while version < min(nexts):
            version += 1
            if made:
                coordinator.version_made(version, 0.001)
