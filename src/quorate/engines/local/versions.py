"""The versions and gradients of a local run: which versions are alive, and which gradients wait to be applied."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import torch

from quorate.engines.base import Job, Outcome
from quorate.engines.shared.buffers import Buffers
from quorate.engines.shared.shared_memory import Block, BlockLayout, BlockStore
from quorate.engines.shared.update import (
    Arrival,
    Maker,
    Weights,
    finds_nan_early,
    leave_out_non_finite,
    torch_threads,
)
from quorate.events import Ticket
from quorate.learner import Learner
from quorate.seeds import derive


class LocalVersions:
    """Keeps live versions, waiting arrivals and their running sum, and makes the next version."""

    def __init__(
        self, job: Job, learner: Learner, layout: BlockLayout, store: BlockStore, workers: int, threads: int
    ) -> None:
        assert job.task is not None
        self._task, self._learner, self._store = job.task, learner, store
        self._seed = job.seed
        self._history = job.policy.history
        self._compensates = bool(job.learning.delay_compensation)
        # Workers keep the cores busy, and an operation that torch splits over all cores waits until its last thread is
        # scheduled. So torch uses only the cores that workers leave free, and threads of a sum take pieces as they can.
        self._threads = torch.get_num_threads()
        self._spare_threads = max(1, min(self._threads, len(os.sched_getaffinity(0)) - workers))
        self._waits_for_all = job.policy.staleness_bound == 0
        torch.set_num_threads(1)
        self._maker = Maker(
            learner,
            layout,
            Buffers(learner.model),
            store.take(),
            worker_threads=threads,
            spare_threads=self._spare_threads,
        )
        # Delay compensation and buffers compare a stale arrival with the version it read, which is kept for them.
        self._keeps_read = self._compensates or (self._maker.buffers.any and job.policy.staleness_bound != 0)
        self._waiting: dict[int, Arrival] = {}  # in order of arrival
        self._folded: list[Ticket] = []  # tickets whose gradients are in the sum
        self._may_fold = not finds_nan_early(job.policy) and self._maker.averager.is_large
        self._older: deque[tuple[int, Block]] = deque()  # versions on which tickets may still start, oldest first

    def version_block(self, version: int) -> Block:
        if version == self._learner.version:
            return self._maker.newest
        return next(block for number, block in self._older if number == version)

    def arrived(self, arrival: Arrival) -> None:
        if not self._keeps_read:
            self._store.release(arrival.version)
        self._waiting[arrival.ticket.id] = arrival

    def drop(self, ticket: Ticket) -> None:
        self._end(self._waiting.pop(ticket.id))
        if ticket in self._folded:
            self._folded = []

    def _end(self, arrival: Arrival) -> None:
        self._store.release(arrival.gradient)
        if self._keeps_read:
            self._store.release(arrival.version)

    def worth_folding_after(self) -> float | None:
        """Seconds without an event after which arrivals are summed: as long as summing takes. None: never."""
        unfolded = len(self._waiting) - len(self._folded)
        if not self._may_fold or unfolded < (1 if self._folded else 2):
            return None
        return unfolded * self._maker.averager.seconds_per_gradient

    def fold(self) -> None:
        """Add the waiting gradients to the sum, while other workers still compute."""
        arrivals, done = list(self._waiting.values()), len(self._folded)
        sources, _ = self._maker.sources(arrivals, None, done)
        self._maker.averager.fold(sources, begun=done > 0)
        self._folded = [arrival.ticket for arrival in arrivals]

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        arrivals = [self._waiting.pop(ticket.id) for ticket in tickets]
        if self._compensates:
            for arrival in arrivals:
                self._maker.compensate(arrival)
        begun = len(self._folded)
        if weights is not None or list(tickets[:begun]) != self._folded:
            begun = 0
        self._folded = []
        self._keep_for_history()
        outcome = self._make(arrivals, weights, begun)
        if outcome is None:
            outcome = self._leave_out(arrivals, weights)
        for arrival in arrivals:
            self._end(arrival)
        return outcome

    def _make(self, arrivals: list[Arrival], weights: Weights, begun: int = 0) -> Outcome | None:
        """Make the next version; None, with nothing changed, if the mean is not finite."""
        before = self._maker.newest
        target = self._room(another=self._maker.plain_sgd_rate(arrivals) is not None)
        outcome = self._maker.make(arrivals, weights, target, begun)
        if target is not before:
            self._store.release(target if outcome is None else before)
        return outcome

    def _room(self, another: bool = False) -> Block:
        """A block for the next version: the newest itself if no worker reads it, unless `another` is needed."""
        newest = self._maker.newest
        return self._store.take() if another or self._store.held_more_than_once(newest) else newest

    def _leave_out(self, arrivals: list[Arrival], weights: Weights) -> Outcome:
        """Apply the finite gradients of an update whose mean is not finite, or make a version without any."""
        outcome, kept = leave_out_non_finite(arrivals, weights, self._maker.finite_ones(arrivals), self._make)
        if outcome is None:
            before, target = self._maker.newest, self._room()
            self._maker.skip(target)
            if target is not before:
                self._store.release(before)
            outcome = Outcome(None, None)
        return outcome._replace(refused=tuple(one.ticket for place, one in enumerate(arrivals) if place not in kept))

    def _keep_for_history(self) -> None:
        if not self._history:
            return
        self._older.append((self._learner.version, self._maker.newest))
        self._store.hold(self._maker.newest)
        while len(self._older) > self._history:
            self._store.release(self._older.popleft()[1])

    def evaluate(self) -> dict[str, float]:
        # Under a synchronous policy all workers wait meanwhile, so all cores are free.
        threads = self._threads if self._waits_for_all else self._spare_threads
        with self._learner.evaluation() as model, torch_threads(threads):
            measures = self._task.evaluate(model, derive(self._seed, "evaluate", self._learner.version))
        self._maker.buffers.reset()  # the evaluation may have changed them
        return measures

    def state(self) -> dict[str, Any]:
        """Copies of everything that a resumed run needs."""
        return {
            "learner": self._learner.state(),
            "older": [
                [number, block.flat.buffer.clone(), [b.clone() for b in block.buffers]] for number, block in self._older
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._maker.restore_learner(state["learner"])
        self._maker.buffers = Buffers(self._learner.model)
        self._maker.newest.set_buffers(self._maker.buffers.newest())
        for number, params, buffers in state["older"]:
            block = self._store.take()
            block.flat.buffer.copy_(params)
            block.set_buffers(buffers)
            self._older.append((number, block))

    def close(self) -> None:
        """End the threads of the sum, and reset the number of torch's threads."""
        self._maker.close()
        torch.set_num_threads(self._threads)
