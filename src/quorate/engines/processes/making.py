"""Gradients become a version: the arithmetic of an update, in one place or in one shard of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quorate.engines._buffers import Buffers
from quorate.engines._kept import mean_scales, shares_of, takes_norms
from quorate.engines.base import Outcome
from quorate.engines.processes.blocks import Block
from quorate.engines.processes.memory import BlockLayout
from quorate.engines.processes.summing import Averager, Source
from quorate.events import Ticket
from quorate.learner import Learner, all_finite, squared_norm, squares
from quorate.noise import Norms

Weights = tuple[float, ...] | None


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


class Prepared(NamedTuple):
    """What one shard says of a mean that is finite: squares of its tensors, to be added up over all shards."""

    first: list[float] | None  # of the first gradient, where norms are taken for the noise scale
    mean: list[float] | None  # of the mean, for that and for clipping


class Maker:
    """Owns the newest version, and makes the next one of arrivals.

    worker_threads: inside torch, where a replay must round alike; spare_threads: where workers leave cores free.
    """

    def __init__(
        self,
        learner: Learner,
        layout: BlockLayout,
        buffers: Buffers,
        newest: Block,
        *,
        worker_threads: int,
        spare_threads: int,
    ) -> None:
        self.learner, self.buffers = learner, buffers
        self.averager = Averager(layout)
        self._compensation = learner.learning.delay_compensation or 0.0
        self._worker_threads, self._spare_threads = worker_threads, spare_threads
        self.newest = newest
        newest.flat.buffer.copy_(learner.flat.buffer)
        self.use(newest)

    def use(self, block: Block) -> None:
        """The learner's parameters are those in this block from now on."""
        self.newest = block
        self.learner.flat = block.flat
        self.learner.point_at(block.flat)
        block.set_buffers(self.buffers.newest())

    def plain_sgd_rate(self, arrivals: Sequence[Arrival]) -> float | None:
        """The learning rate, where a step is no more than parameters − rate·mean."""
        return None if any(one.some_missing for one in arrivals) else self.learner.plain_sgd_rate()

    # ------------------------------------------------------------ in one go

    def make(self, arrivals: Sequence[Arrival], weights: Weights, target: Block, begun: int = 0) -> Outcome | None:
        """The next version into `target`; None, and nothing has changed, if their mean is not finite.

        begun: so many of them are in the sum already. `target` may be the newest block itself, if nobody reads it
        and the step is not plain SGD.
        """
        learner, tickets = self.learner, [arrival.ticket for arrival in arrivals]
        norm = norms = None
        measured = takes_norms(learner.version, tickets, weights, self._compensation)
        rate = self.plain_sgd_rate(arrivals)
        if rate is not None and not measured:
            sources, total = self._sources(arrivals, weights, begun)
            if not self.averager.descend(sources, total, begun > 0, self.newest.runs, target.runs, rate):
                return None
            self._advance_buffers(arrivals)
            self.use(target)
            learner.stepped()
        else:
            if not self._average(arrivals, weights, begun):
                return None
            self._set_gradients(arrivals)
            with torch_threads(self._worker_threads):  # a replay has as many, and rounds alike
                if measured:
                    norms = self._norms(arrivals)
                norm = learner.norm_for_clipping()
            self.commit(arrivals, target, norm)
        return Outcome(mean_loss(tickets, [arrival.loss for arrival in arrivals]), norm, norms=norms)

    def _norms(self, arrivals: Sequence[Arrival]) -> Norms:
        """Of the first arrival and of the mean, which is in `.grad`."""
        samples = sum(arrival.ticket.samples for arrival in arrivals)
        first_sq, mean_sq = squared_norm(self._first(arrivals[0])), squared_norm(self.learner.gradients())
        return Norms(first_sq, arrivals[0].ticket.samples, mean_sq, samples)

    def _first(self, first: Arrival) -> list[torch.Tensor]:
        dtypes = [parameter.dtype for parameter in self.learner.params]  # a 16-bit wire has others
        there = first.present() if first.some_missing else [True] * len(dtypes)
        alone = zip(first.gradient.gradient_views, dtypes, there, strict=True)
        return [grad.to(dtype) for grad, dtype, present in alone if present]

    # ------------------------------------------------------------ in two steps, where shards must agree

    def prepare(self, arrivals: Sequence[Arrival], weights: Weights) -> Prepared | None:
        """The mean into the sum, and what all shards must know of it; None if it is not finite here."""
        if not self._average(arrivals, weights, 0):
            return None
        tickets = [arrival.ticket for arrival in arrivals]
        measured = takes_norms(self.learner.version, tickets, weights, self._compensation)
        if not measured and self.learner.learning.clip_norm is None:
            return Prepared(None, None)
        self._set_gradients(arrivals)
        with torch_threads(self._worker_threads):
            first = squares(self._first(arrivals[0])) if measured else None
            mean = squares(self.learner.gradients())
        self.learner.clear_gradients()
        return Prepared(first, mean)

    def commit(self, arrivals: Sequence[Arrival], target: Block, norm: float | None) -> None:
        """The next version of the mean that is in the sum; `norm` is the global norm, if clipping is on."""
        learner = self.learner
        rate = self.plain_sgd_rate(arrivals)
        self._advance_buffers(arrivals)
        if rate is not None:
            self.averager.descend([], 1.0, True, self.newest.runs, target.runs, rate)
            self.use(target)
            learner.stepped()
        else:
            self._set_gradients(arrivals)
            self._move_to(target)
            with torch_threads(self._spare_threads if self.averager.is_large else 1):
                learner.step(norm)
        learner.clear_gradients()

    # ------------------------------------------------------------ parts of it

    def finite_ones(self, arrivals: Sequence[Arrival]) -> list[int]:
        """The places of those whose gradients hold neither NaN nor Inf."""
        return [place for place, arrival in enumerate(arrivals) if all_finite(arrival.gradient.gradient_runs)]

    def skip(self, target: Block) -> None:
        """A version with nothing to apply."""
        self.learner.clear_gradients()
        self._move_to(target)
        self.learner.skip()

    def compensate(self, arrival: Arrival) -> None:
        """DC-ASGD: g + λ·g⊙g⊙(w − w_read), a first-order guess of the gradient at the newest version."""
        if arrival.ticket.version == self.learner.version:
            return
        for grad, now, then in zip(
            arrival.gradient.gradient_views, self.newest.flat.views, arrival.version.flat.views, strict=True
        ):
            grad.add_(grad * grad * (now - then), alpha=self._compensation)

    def _sources(self, arrivals: Sequence[Arrival], weights: Weights, begun: int) -> tuple[list[Source], float]:
        scales, total = mean_scales([arrival.ticket for arrival in arrivals], weights)
        runs = [arrival.gradient.gradient_runs for arrival in arrivals]
        return [Source(*one) for one in zip(runs[begun:], scales[begun:], strict=True)], total

    def _average(self, arrivals: Sequence[Arrival], weights: Weights, begun: int) -> bool:
        return self.averager.average(*self._sources(arrivals, weights, begun), begun > 0)

    def _set_gradients(self, arrivals: Sequence[Arrival]) -> None:
        params, views = self.learner.params, self.averager.sum.views
        if any(arrival.some_missing for arrival in arrivals):
            masks = [arrival.present() if arrival.some_missing else [True] * len(params) for arrival in arrivals]
            there = [any(column) for column in zip(*masks, strict=True)]
        else:
            there = [True] * len(params)
        for parameter, view, present in zip(params, views, there, strict=True):
            parameter.grad = view if present else None

    def _advance_buffers(self, arrivals: Sequence[Arrival]) -> None:
        if not self.buffers.any:
            return
        newest = self.learner.version
        read = [None if one.ticket.version == newest else one.version.buffers for one in arrivals]
        shares = shares_of([arrival.ticket for arrival in arrivals])
        self.buffers.advance([one.gradient.buffers for one in arrivals], shares, read)

    def _move_to(self, target: Block) -> None:
        """Have the newest parameters in this block, where they may be changed."""
        if target is not self.newest:
            self.averager.copy(self.newest.runs, target.runs)
        self.use(target)

    def close(self) -> None:
        """End the threads."""
        self.averager.close()
        self.learner.clear_gradients()


def mean_loss(tickets: Sequence[Ticket], losses: Sequence[float]) -> float:
    """The mean over all samples."""
    return sum(share * loss for share, loss in zip(shares_of(tickets), losses, strict=True))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads inside torch instead of one."""
    if count > 1:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count > 1:
            torch.set_num_threads(1)
