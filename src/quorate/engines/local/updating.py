"""Arrivals become versions: which gradients wait where, and which versions are alive."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import torch

from quorate.checkpoint import check_same_tensors
from quorate.engines._buffers import Buffers
from quorate.engines._kept import finds_nan_early, mean_scales
from quorate.engines.base import Job, Outcome
from quorate.engines.local.store import Store
from quorate.engines.processes.blocks import Block
from quorate.engines.processes.making import Arrival, Maker, Weights, torch_threads
from quorate.engines.processes.memory import BlockLayout
from quorate.engines.processes.summing import Source
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.learner import Learner
from quorate.seeds import derive


class Updater:
    """Owns the learner's side: the versions alive, the arrivals that wait, and their running sum."""

    def __init__(
        self, job: Job, learner: Learner, layout: BlockLayout, store: Store, workers: int, threads: int
    ) -> None:
        assert job.task is not None
        self._task, self._learner, self._store = job.task, learner, store
        self._seed = job.seed
        self._history = job.policy.history
        self._compensates = bool(job.learning.delay_compensation)
        # Workers keep cores busy, and what torch splits over all cores waits for the last of its threads to be
        # scheduled: ours use the cores that workers leave, and pieces of a sum are taken by whoever is free.
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
        # Whether a stale arrival is compared with the version it read, which must be kept for that.
        self._keeps_read = self._compensates or (self._maker.buffers.any and job.policy.staleness_bound != 0)
        self._waiting: dict[int, Arrival] = {}  # in order of arrival
        self._folded: list[Ticket] = []  # whose gradients are in the sum already
        self._may_fold = not finds_nan_early(job.policy) and self._maker.averager.is_large
        self._older: deque[tuple[int, Block]] = deque()  # versions that tickets may yet start on, oldest first

    def version_block(self, version: int) -> Block:
        if version == self._learner.version:
            return self._maker.newest
        return next(block for number, block in self._older if number == version)

    # ------------------------------------------------------------ arrivals

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
        """How long nothing must happen before arrivals are summed ahead: as long as that takes. None: not at all."""
        unfolded = len(self._waiting) - len(self._folded)
        if not self._may_fold or unfolded < (1 if self._folded else 2):
            return None
        return unfolded * self._maker.averager.seconds_per_gradient

    def fold(self) -> None:
        """Add to the sum what has arrived, while others still compute."""
        arrivals = list(self._waiting.values())
        scales, _ = mean_scales([arrival.ticket for arrival in arrivals], None)
        done = len(self._folded)
        sources = [
            Source(arrival.gradient.gradient_runs, scale)
            for arrival, scale in zip(arrivals[done:], scales[done:], strict=True)
        ]
        self._maker.averager.fold(sources, begun=done > 0)
        self._folded = [arrival.ticket for arrival in arrivals]

    # ------------------------------------------------------------ the update

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

    def _make(self, arrivals: list[Arrival], weights: Weights, begun: int) -> Outcome | None:
        """The next version of these; None, and nothing has changed, if their mean is not finite."""
        before = self._maker.newest
        target = self._room(another=self._maker.plain_sgd_rate(arrivals) is not None)
        outcome = self._maker.make(arrivals, weights, target, begun)
        if target is not before:
            self._store.release(target if outcome is None else before)
        return outcome

    def _room(self, another: bool = False) -> Block:
        """A block for the next version: the newest itself, if nobody reads it, unless it must be another one."""
        newest = self._maker.newest
        return self._store.take() if another or self._store.held_more_than_once(newest) else newest

    def _leave_out(self, arrivals: list[Arrival], weights: Weights) -> Outcome:
        """Some gradient is not finite, or their sum overflows: apply those that are, if any."""
        kept = self._maker.finite_ones(arrivals)
        if 0 < len(kept) < len(arrivals):
            kept_weights = None if weights is None else tuple(weights[place] for place in kept)
            outcome = self._make([arrivals[place] for place in kept], kept_weights, 0)
            if outcome is not None:
                refused = tuple(one.ticket for place, one in enumerate(arrivals) if place not in kept)
                return outcome._replace(refused=refused)
        before, target = self._maker.newest, self._room()
        self._maker.skip(target)
        if target is not before:
            self._store.release(before)
        return Outcome(None, None, tuple(arrival.ticket for arrival in arrivals))

    def _keep_for_history(self) -> None:
        if not self._history:
            return
        self._older.append((self._learner.version, self._maker.newest))
        self._store.hold(self._maker.newest)
        while len(self._older) > self._history:
            self._store.release(self._older.popleft()[1])

    # ------------------------------------------------------------ reading

    def evaluate(self) -> dict[str, float]:
        # Under a synchronous policy everybody waits meanwhile, so all cores are free.
        threads = self._threads if self._waits_for_all else self._spare_threads
        with self._learner.evaluation() as model, torch_threads(threads):
            measures = self._task.evaluate(model, derive(self._seed, "evaluate", self._learner.version))
        self._maker.buffers.reset()  # measuring must not change what is measured
        return measures

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Copies of all that a resumed run needs."""
        return {
            "learner": self._learner.state(),
            "older": [
                [number, block.flat.buffer.clone(), [b.clone() for b in block.buffers]] for number, block in self._older
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` gave."""
        check_same_tensors(self._learner.model.state_dict(), state["learner"]["model"], "model")
        try:
            self._learner.restore(state["learner"])
        except (KeyError, ValueError, TypeError) as error:
            raise BadInput(
                f"the checkpoint is of another optimizer or schedule ({error}); give the task it was made with"
            ) from error
        self._maker.buffers = Buffers(self._learner.model)
        self._maker.newest.set_buffers(self._maker.buffers.newest())
        for number, params, buffers in state["older"]:
            block = self._store.take()
            block.flat.buffer.copy_(params)
            block.set_buffers(buffers)
            self._older.append((number, block))

    def close(self) -> None:
        """End the threads, and give torch back its own."""
        self._maker.close()
        torch.set_num_threads(self._threads)
