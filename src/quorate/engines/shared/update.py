"""The arithmetic of an update, for the whole model or one shard of it: the mean of gradients makes a version.

Adding eight gradients one after the other would read and write the whole sum eight times. The `Averager` works on
pieces instead: a piece of the sum stays in the cache until all eight gradients are added to it, and for plain SGD
also until the new parameters are computed from it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from quorate.checkpoint import check_same_tensors
from quorate.engines.base import Outcome
from quorate.engines.shared.buffers import Buffers
from quorate.engines.shared.shared_memory import Block, BlockLayout
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.learner import Learner, all_finite, squared_norm, squares
from quorate.noise import Norms, is_measured
from quorate.policies import Policy

#: Names of arithmetic in a trace's header: every ticket keeps its own gradient, in 32 bits or in bf16.
KEPT, KEPT_HALF = "kept", "kept-bf16"

Weights = tuple[float, ...] | None
T = TypeVar("T")


def finds_nan_early(policy: Policy) -> bool:
    """Whether each gradient is checked for NaN and Inf when it arrives, not only its loss.

    A synchronous round finds a bad gradient in the sum, which costs one check instead of one per worker, and applies
    the other gradients. A policy without rounds would have nothing left to apply, so it is told at the arrival.
    """
    return policy.staleness_bound != 0 or policy.weighs


def takes_norms(version: int, tickets: Sequence[Ticket], weights: Weights, compensation: float) -> bool:
    """Whether this update measures the noise scale: a plain mean of several gradients, on a measured version."""
    return is_measured(version) and len(tickets) > 1 and weights is None and not compensation


def noise_norms(tickets: Sequence[Ticket], first_sq: float, mean_sq: float) -> Norms:
    """For the noise scale: the squared norms of the first ticket's gradient and of the mean over all tickets."""
    return Norms(first_sq, tickets[0].samples, mean_sq, sum(ticket.samples for ticket in tickets))


def compensate(grads: Sequence[Tensor | None], newest: Flat, read: Flat, factor: float) -> None:
    """DC-ASGD: g + λ·g⊙g⊙(w − w_read), a first-order estimate of the gradient at the newest version."""
    for grad, now, then in zip(grads, newest.views, read.views, strict=True):
        if grad is not None:
            grad.add_(grad * grad * (now - then), alpha=factor)


def mean_scales(tickets: Sequence[Ticket], weights: Weights) -> tuple[list[float], float]:
    """The factor of each gradient and the divisor of their sum, for a mean weighted by samples.

    Factors are relative to the samples of the first ticket. Gradients of equal batches thus have the factor 1 and
    can be summed before the number of arrivals is known.
    """
    first = tickets[0].samples
    scales = [ticket.samples / first for ticket in tickets]
    total = sum(scales)
    return scales if weights is None else [scale * w for scale, w in zip(scales, weights, strict=True)], total


def shares_of(tickets: Sequence[Ticket]) -> list[float]:
    """Each ticket's share of all samples."""
    total = sum(ticket.samples for ticket in tickets)
    return [ticket.samples / total for ticket in tickets]


def mean_loss(tickets: Sequence[Ticket], losses: Sequence[float]) -> float:
    """The mean over all samples."""
    return sum(share * loss for share, loss in zip(shares_of(tickets), losses, strict=True))


def scaled_sum(grads: list[Tensor | None], scales: list[float]) -> Tensor | None:
    """Σ scale·grad over the gradients that exist. Inputs are not changed; a single unscaled one is returned as is."""
    total: Tensor | None = None
    is_copy = False  # whether `total` may be changed in place
    for grad, scale in zip(grads, scales, strict=True):
        if grad is None:
            continue
        if total is None:
            is_copy = scale != 1.0
            total = grad * scale if is_copy else grad
        else:
            total = total.add_(grad, alpha=scale) if is_copy else total.add(grad, alpha=scale)
            is_copy = True
    return total


def leave_out_non_finite(
    arrivals: Sequence[T],
    weights: Weights,
    finite: Sequence[int],
    make: Callable[[list[T], Weights], Outcome | None],
) -> tuple[Outcome | None, Sequence[int]]:
    """Retry an update whose mean is not finite with only the finite gradients, at the positions `finite`.

    Returns the outcome and the positions of the applied arrivals. Nothing can be applied, and the outcome is None, if
    no gradient is finite, if all are and only their sum overflows, or if the mean of the finite ones overflows too.
    """
    if 0 < len(finite) < len(arrivals):
        outcome = make([arrivals[place] for place in finite], weights_of(weights, finite))
        if outcome is not None:
            return outcome, finite
    return None, ()


def weights_of(weights: Weights, kept: Sequence[int]) -> Weights:
    return None if weights is None else tuple(weights[place] for place in kept)


@dataclass
class Arrival:
    """A gradient that waits to be applied or dropped."""

    ticket: Ticket
    version: Block  # the version it was computed at
    gradient: Block
    loss: float
    some_missing: bool  # some parameters have no gradient, because the loss does not depend on them

    def present(self) -> list[bool]:
        """By parameter: whether it has a gradient."""
        mask = self.gradient.mask
        return [bool(there) for there in mask.tolist()] if self.some_missing else [True] * len(mask)


class Prepared(NamedTuple):
    """Squared norms of one shard's tensors, to be added up over all shards; its mean is finite."""

    first: list[float] | None  # of the first gradient, if this update measures the noise scale
    mean: list[float] | None  # of the mean, for the noise scale and for clipping


class Maker:
    """Owns the newest version, and makes the next one from arrivals.

    worker_threads: torch threads of one worker; norms are computed with as many, so that a replay rounds alike.
    spare_threads: torch threads on the cores that workers leave free, for the optimizer step.
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
        newest.flat.buffer.copy_(learner.flat.buffer)
        self.use(newest)

    def use(self, block: Block) -> None:
        """From now on, the parameters in this block are the learner's."""
        self.newest = block
        self.learner.flat = block.flat
        self.learner.point_at(block.flat)
        block.set_buffers(self.buffers.newest())

    def plain_sgd_rate(self, arrivals: Sequence[Arrival]) -> float | None:
        """The learning rate if the step is just parameters − rate·mean; None if it is more."""
        return None if any(one.some_missing for one in arrivals) else self.learner.plain_sgd_rate()

    # ------------------------------------------------------------ in one step

    def make(self, arrivals: Sequence[Arrival], weights: Weights, target: Block, begun: int = 0) -> Outcome | None:
        """Make the next version in `target`; None, with nothing changed, if the mean is not finite.

        begun: the number of leading arrivals that are in the sum already.
        `target` may be the newest block itself, if no worker reads it and the step is not plain SGD.
        """
        learner, tickets = self.learner, [arrival.ticket for arrival in arrivals]
        norm = norms = None
        measured = takes_norms(learner.version, tickets, weights, self._compensation)
        rate = self.plain_sgd_rate(arrivals)
        if rate is not None and not measured:
            sources, total = self.sources(arrivals, weights, begun)
            if not self.averager.descend(sources, total, begun > 0, self.newest.runs, target.runs, rate):
                return None
            self._advance_buffers(arrivals)
            self.use(target)
            learner.stepped()
        else:
            if not self._average(arrivals, weights, begun):
                return None
            self._set_gradients(arrivals)
            with torch_threads(self._worker_threads):
                if measured:
                    first_sq = squared_norm(self._first(arrivals[0]))
                    norms = noise_norms(tickets, first_sq, squared_norm(learner.gradients()))
                norm = learner.norm_for_clipping()
            self.commit(arrivals, target, norm)
        return Outcome(mean_loss(tickets, [arrival.loss for arrival in arrivals]), norm, norms=norms)

    def _first(self, first: Arrival) -> list[Tensor]:
        """The gradient of the first arrival, in the dtypes of the parameters: a 16-bit wire has others."""
        by_parameter = zip(self.learner.params, first.gradient.gradient_views, first.present(), strict=True)
        return [grad.to(parameter.dtype) for parameter, grad, present in by_parameter if present]

    # ------------------------------------------------------------ in two steps, if shards must agree

    def prepare(self, arrivals: Sequence[Arrival], weights: Weights) -> Prepared | None:
        """Compute the mean, and the norms that all shards must know; None if it is not finite in this shard."""
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
        """Make the next version from the mean in `averager.sum`; `norm` is the global norm, if clipping is on."""
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

    # ------------------------------------------------------------ parts of an update

    def finite_ones(self, arrivals: Sequence[Arrival]) -> list[int]:
        """Positions of the arrivals whose gradients hold neither NaN nor Inf."""
        return [place for place, arrival in enumerate(arrivals) if all_finite(arrival.gradient.gradient_runs)]

    def skip(self, target: Block) -> None:
        """Make a version that applies no gradient."""
        self.learner.clear_gradients()
        self._move_to(target)
        self.learner.skip()

    def compensate(self, arrival: Arrival) -> None:
        """Delay compensation of a stale gradient, in place."""
        if arrival.ticket.version != self.learner.version:
            compensate(arrival.gradient.gradient_views, self.newest.flat, arrival.version.flat, self._compensation)

    def sources(self, arrivals: Sequence[Arrival], weights: Weights, begun: int) -> tuple[list[Source], float]:
        """Gradients that are not in the sum yet, each with its factor, and the divisor of the whole sum."""
        scales, total = mean_scales([arrival.ticket for arrival in arrivals], weights)
        runs = [arrival.gradient.gradient_runs for arrival in arrivals]
        return [Source(*one) for one in zip(runs[begun:], scales[begun:], strict=True)], total

    def _average(self, arrivals: Sequence[Arrival], weights: Weights, begun: int) -> bool:
        return self.averager.average(*self.sources(arrivals, weights, begun), begun > 0)

    def _set_gradients(self, arrivals: Sequence[Arrival]) -> None:
        """Put the mean into `.grad`; None for parameters that have a gradient in no arrival."""
        masks = [arrival.present() for arrival in arrivals if arrival.some_missing]
        all_present = len(masks) < len(arrivals)  # some arrival has a gradient for every parameter
        for place, (parameter, view) in enumerate(zip(self.learner.params, self.averager.sum.views, strict=True)):
            parameter.grad = view if all_present or any(mask[place] for mask in masks) else None

    def _advance_buffers(self, arrivals: Sequence[Arrival]) -> None:
        if not self.buffers.any:
            return
        newest = self.learner.version
        read = [None if one.ticket.version == newest else one.version.buffers for one in arrivals]
        shares = shares_of([arrival.ticket for arrival in arrivals])
        self.buffers.advance([one.gradient.buffers for one in arrivals], shares, read)

    def _move_to(self, target: Block) -> None:
        """Copy the newest parameters into this block, where the optimizer changes them."""
        if target is not self.newest:
            self.averager.copy(self.newest.runs, target.runs)
        self.use(target)

    def restore_learner(self, state: dict[str, Any]) -> None:
        """Restore the learner from a checkpoint; BadInput if it was made with another model or optimizer."""
        check_same_tensors(self.learner.model.state_dict(), state["model"], "model")
        try:
            self.learner.restore(state)
        except (KeyError, ValueError, TypeError) as error:
            raise BadInput(
                f"the checkpoint is of another optimizer or schedule ({error}); give the task it was made with"
            ) from error

    def close(self) -> None:
        self.averager.close()
        self.learner.clear_gradients()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this number of threads instead of one."""
    if count > 1:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count > 1:
            torch.set_num_threads(1)


#: Elements of a piece. Measured: the largest size at which a piece and one piece of a gradient stay in the cache.
PIECE = 1 << 18
#: With no more pieces than this, waking threads costs more than it saves.
_FEW = 4
_MOST_THREADS = 8  # memory bandwidth does not grow with more threads


class Source(NamedTuple):
    """One gradient, as long vectors, and its factor."""

    runs: Sequence[Tensor]
    scale: float


class Averager:
    """Keeps the running sum; turns it into a mean, or for plain SGD directly into the next version.

    begun: whether the sum holds gradients already.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.sum = Flat(layout.params, torch.device("cpu"))
        self._sum_runs = layout.params.runs(self.sum.buffer)
        self._pieces = [
            (run, start, min(start + PIECE, vector.numel()))
            for run, vector in enumerate(self._sum_runs)
            for start in range(0, vector.numel(), PIECE)
        ]
        self._helpers = min(len(os.sched_getaffinity(0)), _MOST_THREADS) - 1 if self.is_large else 0
        self._threads: ThreadPoolExecutor | None = None
        self.seconds_per_gradient = layout.params.nbytes * 1e-10  # an initial guess; `fold` measures it

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    @property
    def is_large(self) -> bool:
        """Whether summing takes long enough to be worth starting before the quorum is complete."""
        return len(self._pieces) > _FEW

    def fold(self, sources: Sequence[Source], begun: bool) -> None:
        """Add gradients to the sum before the quorum is complete."""
        started = perf_counter()
        for run, start, stop in self._pieces:  # no threads: workers use the other cores
            _add_up(self._sum_runs[run][start:stop], sources, run, start, stop, begun)
        self.seconds_per_gradient = (perf_counter() - started) / len(sources)

    def average(self, sources: Sequence[Source], total: float, begun: bool) -> bool:
        """Compute the mean in `sum`; False if it is not finite."""

        def piece(run: int, start: int, stop: int) -> bool:
            mean = self._sum_runs[run][start:stop]
            _add_up(mean, sources, run, start, stop, begun)
            if total != 1.0:
                mean.div_(total)
            return _finite(mean)

        return self._each_piece(piece)

    def descend(
        self,
        sources: Sequence[Source],
        total: float,
        begun: bool,
        old: Sequence[Tensor],
        new: Sequence[Tensor],
        rate: float,
    ) -> bool:
        """new = old − rate · mean, in one pass; False if the mean is not finite, and `new` is then invalid."""

        def piece(run: int, start: int, stop: int) -> bool:
            mean = torch.empty(stop - start, dtype=old[run].dtype)  # small enough for the allocator to reuse memory
            if begun:
                mean.copy_(self._sum_runs[run][start:stop])
            _add_up(mean, sources, run, start, stop, begun)
            if total != 1.0:
                mean.div_(total)
            torch.add(old[run][start:stop], mean, alpha=-rate, out=new[run][start:stop])
            return _finite(mean)

        return self._each_piece(piece)

    def copy(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        def piece(run: int, start: int, stop: int) -> bool:
            new[run][start:stop].copy_(old[run][start:stop])
            return True

        self._each_piece(piece)

    def _each_piece(self, work: Callable[[int, int, int], bool]) -> bool:
        """Call `work` for every piece, on all threads, until one call returns False."""
        todo = iter(self._pieces)  # taking the next element of a list iterator is atomic
        if not self._helpers:
            return _work_through(todo, work)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._helpers, "quorate-sum")
        others = [self._threads.submit(_work_through, todo, work) for _ in range(self._helpers)]
        mine = _work_through(todo, work)
        theirs = [other.result() for other in others]  # a list, so that all threads have ended
        return mine and all(theirs)


def _work_through(todo: Iterator[tuple[int, int, int]], work: Callable[[int, int, int], bool]) -> bool:
    return all(work(*piece) for piece in todo)


def _add_up(into: Tensor, sources: Sequence[Source], run: int, start: int, stop: int, begun: bool) -> None:
    """into = Σ scale·gradient in this order; += if the sum has begun."""
    rest = sources
    if not begun:
        first = sources[0].runs[run][start:stop]
        if sources[0].scale == 1.0 and len(sources) > 1 and first.dtype == into.dtype:
            torch.add(first, sources[1].runs[run][start:stop], alpha=sources[1].scale, out=into)
            rest = sources[2:]
        else:
            into.copy_(first)
            if sources[0].scale != 1.0:
                into.mul_(sources[0].scale)
            rest = sources[1:]
    for runs, scale in rest:
        into.add_(runs[run][start:stop], alpha=scale)


def _finite(vector: Tensor) -> bool:
    return math.isfinite(vector.sum().item()) or bool(torch.isfinite(vector).all())
