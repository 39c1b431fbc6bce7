"""Arrivals become versions: which gradients wait where, and how the next version is made of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quorate.checkpoint import check_same_tensors
from quorate.engines._buffers import Buffers
from quorate.engines._kept import finds_nan_early, mean_scales, shares_of, takes_norms
from quorate.engines.base import Job, Outcome
from quorate.engines.local.memory import BlockLayout
from quorate.engines.local.store import Block, Store
from quorate.engines.local.summing import Averager, Source
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.learner import Learner, all_finite, squared_norm
from quorate.noise import Norms
from quorate.seeds import derive


@dataclass
class Arrival:
    """A gradient that is there and waits to be applied or dropped."""

    ticket: Ticket
    version: Block  # what it was computed at
    gradient: Block
    loss: float
    some_missing: bool  # the loss did not reach every parameter

    def present(self) -> list[bool]:
        return [bool(there) for there in self.gradient.mask.tolist()]


class Updater:
    """Owns the learner's side: the versions alive, the arrivals that wait, and their running sum."""

    def __init__(
        self, job: Job, learner: Learner, layout: BlockLayout, store: Store, workers: int, threads: int
    ) -> None:
        assert job.task is not None
        self._task, self._learner, self._store = job.task, learner, store
        self._seed = job.seed
        self._history = job.policy.history
        self._compensation = job.learning.delay_compensation or 0.0
        self._averager = Averager(layout)
        self._buffers = Buffers(learner.model)
        # Whether a stale arrival is compared with the version it read, which must be kept for that.
        self._keeps_read = bool(self._compensation) or (self._buffers.any and job.policy.staleness_bound != 0)
        self._waiting: dict[int, Arrival] = {}  # in order of arrival
        self._folded: list[Ticket] = []  # whose gradients are in the sum already
        self._may_fold = not finds_nan_early(job.policy) and self._averager.is_large
        # Workers keep cores busy, and what torch splits over all cores waits for the last of its threads to be
        # scheduled: ours use the cores that workers leave, and pieces of a sum are taken by whoever is free.
        self._threads = torch.get_num_threads()
        self._threads_beside_workers = max(1, min(self._threads, len(os.sched_getaffinity(0)) - workers))
        self._worker_threads = threads
        self._waits_for_all = job.policy.staleness_bound == 0
        self._newest = store.take()
        torch.set_num_threads(1)
        self._newest.flat.buffer.copy_(learner.flat.buffer)
        self._older: deque[tuple[int, Block]] = deque()  # versions that tickets may yet start on, oldest first
        self._use(self._newest)

    def _use(self, block: Block) -> None:
        """The learner's parameters are those in this block from now on."""
        self._newest = block
        self._learner.flat = block.flat
        self._learner.point_at(block.flat)
        block.set_buffers(self._buffers.newest())

    def version_block(self, version: int) -> Block:
        if version == self._learner.version:
            return self._newest
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
        return unfolded * self._averager.seconds_per_gradient

    def fold(self) -> None:
        """Add to the sum what has arrived, while others still compute."""
        arrivals = list(self._waiting.values())
        scales, _ = mean_scales([arrival.ticket for arrival in arrivals], None)
        done = len(self._folded)
        sources = [
            Source(arrival.gradient.gradient_runs, scale)
            for arrival, scale in zip(arrivals[done:], scales[done:], strict=True)
        ]
        self._averager.fold(sources, begun=done > 0)
        self._folded = [arrival.ticket for arrival in arrivals]

    # ------------------------------------------------------------ the update

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        arrivals = [self._waiting.pop(ticket.id) for ticket in tickets]
        if self._compensation:
            for arrival in arrivals:
                self._compensate(arrival)
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

    def _make(self, arrivals: list[Arrival], weights: tuple[float, ...] | None, begun: int) -> Outcome | None:
        """The next version of these; None, and nothing has changed, if their mean is not finite."""
        learner, tickets = self._learner, [arrival.ticket for arrival in arrivals]
        scales, total = mean_scales(tickets, weights)
        sources = [
            Source(arrival.gradient.gradient_runs, scale)
            for arrival, scale in zip(arrivals[begun:], scales[begun:], strict=True)
        ]
        complete = not any(arrival.some_missing for arrival in arrivals)
        rate = learner.plain_sgd_rate() if complete else None
        norm = norms = None
        if takes_norms(learner.version, tickets, weights, self._compensation):
            if not self._averager.average(sources, total, begun > 0):
                return None
            norms = self._norms(arrivals)
            sources, total, begun = [], 1.0, len(arrivals)  # what follows finds the mean in the sum
        if rate is not None:
            block = self._store.take()
            fine = self._averager.descend(sources, total, begun > 0, self._newest.runs, block.runs, rate)
            if not fine:
                self._store.release(block)
                return None
            self._advance_buffers(arrivals)
            self._store.release(self._newest)
            self._use(block)
            learner.stepped()
        else:
            if not self._averager.average(sources, total, begun > 0):
                return None
            self._set_gradients(arrivals)
            with _torch_threads(self._worker_threads):  # a replay has as many, and rounds alike
                norm = learner.norm_for_clipping()
            self._advance_buffers(arrivals)
            self._use(self._room_for_next())
            with _torch_threads(self._threads_beside_workers if self._averager.is_large else 1):
                learner.step(norm)
            learner.clear_gradients()
        shares = shares_of(tickets)
        loss = sum(share * arrival.loss for share, arrival in zip(shares, arrivals, strict=True))
        return Outcome(loss, norm, norms=norms)

    def _norms(self, arrivals: list[Arrival]) -> Norms:
        """Of the first arrival and of the mean, which is in the sum."""
        first, learner = arrivals[0], self._learner
        dtypes = [parameter.dtype for parameter in learner.params]  # a 16-bit wire has others
        there = first.present() if first.some_missing else [True] * len(dtypes)
        alone = zip(first.gradient.gradient_views, dtypes, there, strict=True)
        self._set_gradients(arrivals)
        with _torch_threads(self._worker_threads):  # a replay has as many, and rounds alike
            first_sq = squared_norm([grad.to(dtype) for grad, dtype, present in alone if present])
            mean_sq = squared_norm(learner.gradients())
        learner.clear_gradients()
        samples = sum(arrival.ticket.samples for arrival in arrivals)
        return Norms(first_sq, first.ticket.samples, mean_sq, samples)

    def _set_gradients(self, arrivals: list[Arrival]) -> None:
        params, views = self._learner.params, self._averager.sum.views
        if any(arrival.some_missing for arrival in arrivals):
            masks = [arrival.present() if arrival.some_missing else [True] * len(params) for arrival in arrivals]
            there = [any(column) for column in zip(*masks, strict=True)]
        else:
            there = [True] * len(params)
        for parameter, view, present in zip(params, views, there, strict=True):
            parameter.grad = view if present else None

    def _room_for_next(self) -> Block:
        """A block with the newest parameters that may be changed: the same one, if nobody reads it."""
        if not self._store.held_more_than_once(self._newest):
            return self._newest
        block = self._store.take()
        self._averager.copy(self._newest.runs, block.runs)
        self._store.release(self._newest)
        return block

    def _leave_out(self, arrivals: list[Arrival], weights: tuple[float, ...] | None) -> Outcome:
        """Some gradient is not finite, or their sum overflows: apply those that are, if any."""
        kept = [place for place, arrival in enumerate(arrivals) if all_finite(arrival.gradient.gradient_runs)]
        if 0 < len(kept) < len(arrivals):
            kept_weights = None if weights is None else tuple(weights[place] for place in kept)
            outcome = self._make([arrivals[place] for place in kept], kept_weights, 0)
            if outcome is not None:
                refused = tuple(one.ticket for place, one in enumerate(arrivals) if place not in kept)
                return outcome._replace(refused=refused)
        self._learner.clear_gradients()
        self._use(self._room_for_next())
        self._learner.skip()
        return Outcome(None, None, tuple(arrival.ticket for arrival in arrivals))

    def _advance_buffers(self, arrivals: list[Arrival]) -> None:
        if not self._buffers.any:
            return
        newest = self._learner.version
        read = [None if one.ticket.version == newest else one.version.buffers for one in arrivals]
        shares = shares_of([arrival.ticket for arrival in arrivals])
        self._buffers.advance([one.gradient.buffers for one in arrivals], shares, read)

    def _keep_for_history(self) -> None:
        if not self._history:
            return
        self._older.append((self._learner.version, self._newest))
        self._store.hold(self._newest)
        while len(self._older) > self._history:
            self._store.release(self._older.popleft()[1])

    def _compensate(self, arrival: Arrival) -> None:
        """DC-ASGD: g + λ·g⊙g⊙(w − w_read), a first-order guess of the gradient at the newest version."""
        if arrival.ticket.version == self._learner.version:
            return
        for grad, now, then in zip(
            arrival.gradient.gradient_views, self._newest.flat.views, arrival.version.flat.views, strict=True
        ):
            grad.add_(grad * grad * (now - then), alpha=self._compensation)

    # ------------------------------------------------------------ reading

    def evaluate(self) -> dict[str, float]:
        # Under a synchronous policy everybody waits meanwhile, so all cores are free.
        threads = self._threads if self._waits_for_all else self._threads_beside_workers
        with self._learner.evaluation() as model, _torch_threads(threads):
            measures = self._task.evaluate(model, derive(self._seed, "evaluate", self._learner.version))
        self._buffers.reset()  # measuring must not change what is measured
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
        self._buffers = Buffers(self._learner.model)
        self._newest.set_buffers(self._buffers.newest())
        for number, params, buffers in state["older"]:
            block = self._store.take()
            block.flat.buffer.copy_(params)
            block.set_buffers(buffers)
            self._older.append((number, block))

    def close(self) -> None:
        """End the threads, and give torch back its own."""
        self._averager.close()
        self._learner.clear_gradients()
        torch.set_num_threads(self._threads)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """So many threads inside torch instead of one."""
    if count > 1:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count > 1:
            torch.set_num_threads(1)
