"""Asynchronous arithmetic: every ticket keeps a gradient of its own, computed at the version it read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quorate.engines._bench import Bench, Strategy
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.learner import all_finite, squared_norm
from quorate.noise import Norms, is_measured
from quorate.policies import Policy

HALF = "kept-bf16"


class Gradient(NamedTuple):
    """What a ticket's computation gave."""

    grads: Sequence[Tensor | None]
    loss: float
    read_buffers: list[Tensor]  # before its forward pass
    buffers: list[Tensor]  # and after
    read: Flat | None  # the parameters it was computed at, where delay compensation wants them
    norm: float | None = None  # of all of it, where that is known


class _Version(NamedTuple):
    flat: Flat
    buffers: list[Tensor]


class Kept(Strategy):
    """For policies that apply stale or weighted gradients.

    A gradient is computed when its ticket starts, while the parameters it reads are still the newest: so no
    version need be copied, but for policies that start tickets on older ones (`history`).
    """

    arithmetic = "kept"

    def __init__(self, bench: Bench, policy: Policy, half: bool = False) -> None:
        super().__init__(bench)
        if half:
            self.arithmetic = HALF
        self._half = half  # round gradients as a 16-bit wire does
        self._history = policy.history
        self._early = finds_nan_early(policy)
        self._compensation = self.learner.learning.delay_compensation or 0.0
        self._gradients: dict[int, Gradient | None] = {}  # None: not finite
        self._old: dict[int, _Version] = {}  # the last `history` versions before the newest
        self._read: WeakValueDictionary[int, Flat] = WeakValueDictionary()  # versions that gradients refer to

    def started(self, ticket: Ticket) -> None:
        self._gradients[ticket.id] = self._compute(ticket)

    def arrived(self, ticket: Ticket) -> bool:
        if self._gradients[ticket.id] is not None:
            return True
        del self._gradients[ticket.id]
        return False

    def ended(self, ticket: Ticket, arrived: bool) -> None:
        self._gradients.pop(ticket.id, None)

    # ------------------------------------------------------------ computing

    def _compute(self, ticket: Ticket) -> Gradient | None:
        learner, buffers = self.learner, self.bench.buffers
        with self._reading(ticket.version) as read_buffers:
            loss = self.bench.backward([ticket.batch]).item()
            after = buffers.after_forward()
        there = self.bench.gradients()
        grads = [parameter.grad for parameter in learner.params]
        if self._half:
            grads = [None if grad is None else grad.bfloat16().to(grad.dtype) for grad in grads]
        learner.clear_gradients()
        if not math.isfinite(loss) or (self._early and not all_finite(there)):
            return None
        read = self._snapshot(ticket.version) if self._compensation else None
        return Gradient(grads, loss, read_buffers, after, read)

    @contextmanager
    def _reading(self, version: int) -> Iterator[list[Tensor]]:
        """Let the model compute at this version; gives a copy of the buffers that it begins with."""
        if version == self.learner.version:
            yield self.bench.buffers.newest()
            return
        old = self._old[version]
        self.learner.point_at(old.flat)
        self.bench.buffers.load(old.buffers)
        yield old.buffers
        self.learner.point_at(self.learner.flat)

    def _snapshot(self, version: int) -> Flat:
        """A copy of a version's parameters that lives as long as a gradient refers to it."""
        if version in self._old:
            return self._old[version].flat
        flat = self._read.get(version)
        if flat is None:
            flat = self.learner.flat.copy()
            self._read[version] = flat
        return flat

    # ------------------------------------------------------------ applying

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        learner = self.learner
        gradients = []
        for ticket in tickets:
            gradient = self._gradients.pop(ticket.id)
            assert gradient is not None, "what is not finite never arrived"
            gradients.append(gradient)
        if self._compensation:
            for ticket, gradient in zip(tickets, gradients, strict=True):
                self._compensate(ticket, gradient)
        self._keep_newest()
        measured = takes_norms(learner.version, tickets, weights, self._compensation)
        # Before they are averaged, since a gradient that nobody else has becomes the mean in place.
        first_sq = squared_norm([grad for grad in gradients[0].grads if grad is not None]) if measured else None
        shares = self._average(tickets, gradients, weights)
        if not all_finite(learner.gradients()):
            return self._leave_out(tickets, gradients, weights)
        norms = None
        if first_sq is not None:
            samples = sum(ticket.samples for ticket in tickets)
            norms = Norms(first_sq, tickets[0].samples, squared_norm(learner.gradients()), samples)
        return self._step(tickets, gradients, shares)._replace(norms=norms)

    def _average(
        self, tickets: Sequence[Ticket], gradients: Sequence[Gradient], weights: tuple[float, ...] | None
    ) -> list[float]:
        """Put the weighted mean into `.grad`; gives the share of each arrival."""
        scales, total = mean_scales(tickets, weights)
        for place, parameter in enumerate(self.learner.params):
            parameter.grad = _scaled_sum([gradient.grads[place] for gradient in gradients], scales)
        if total != 1.0:
            torch._foreach_div_(self.learner.gradients(), total)
        return shares_of(tickets)

    def _leave_out(
        self, tickets: tuple[Ticket, ...], gradients: list[Gradient], weights: tuple[float, ...] | None
    ) -> Outcome:
        """Some gradient is not finite, or their sum overflows: apply those that are, if any."""
        kept = [
            place
            for place, gradient in enumerate(gradients)
            if all_finite([grad for grad in gradient.grads if grad is not None])
        ]
        if 0 < len(kept) < len(tickets):
            good = tuple(tickets[place] for place in kept)
            fine = [gradients[place] for place in kept]
            shares = self._average(good, fine, None if weights is None else tuple(weights[place] for place in kept))
            if all_finite(self.learner.gradients()):
                refused = tuple(ticket for ticket in tickets if ticket not in good)
                return self._step(good, fine, shares)._replace(refused=refused)
        self.learner.clear_gradients()
        self.learner.skip()
        return Outcome(None, None, tickets)

    def _step(self, tickets: Sequence[Ticket], gradients: Sequence[Gradient], shares: list[float]) -> Outcome:
        learner = self.learner
        norm = learner.norm_for_clipping()
        read = [
            None if ticket.version == learner.version else gradient.read_buffers
            for ticket, gradient in zip(tickets, gradients, strict=True)
        ]
        self.bench.buffers.advance([gradient.buffers for gradient in gradients], shares, read)
        learner.step(norm)
        learner.clear_gradients()
        return Outcome(sum(share * one.loss for share, one in zip(shares, gradients, strict=True)), norm)

    def _keep_newest(self) -> None:
        """Copy the newest version before it is overwritten, if tickets may yet be started on it."""
        if not self._history:
            return
        version = self.learner.version
        spare = self._old.pop(version - self._history, None)
        # A gradient that is to be compensated may still refer to the oldest copy.
        flat = self.learner.flat.copy() if spare is None or self._compensation else spare.flat
        flat.buffer.copy_(self.learner.flat.buffer)
        self._old[version] = _Version(flat, self.bench.buffers.newest())

    def _compensate(self, ticket: Ticket, gradient: Gradient) -> None:
        """DC-ASGD: g + λ·g⊙g⊙(w − w_read), a first-order guess of the gradient at the newest version."""
        if ticket.version == self.learner.version:
            return
        assert gradient.read is not None
        for grad, now, then in zip(gradient.grads, self.learner.flat.views, gradient.read.views, strict=True):
            if grad is not None:
                grad.add_(grad * grad * (now - then), alpha=self._compensation)


def finds_nan_early(policy: Policy) -> bool:
    """Whether every gradient is looked through when it arrives, not only its loss.

    A synchronous round finds a bad gradient in the sum, which costs one look instead of one a worker, and applies
    the others. A policy without rounds would have nothing left to apply, and is told at the arrival instead.
    """
    return policy.staleness_bound != 0 or bool(getattr(policy, "staleness_weights", False))


def takes_norms(
    version: int, tickets: Sequence[Ticket], weights: tuple[float, ...] | None, compensation: float
) -> bool:
    """Whether this update is one for the noise scale: a plain mean of several gradients, on a measured version."""
    return is_measured(version) and len(tickets) > 1 and weights is None and not compensation


def mean_scales(tickets: Sequence[Ticket], weights: tuple[float, ...] | None) -> tuple[list[float], float]:
    """What to multiply each gradient with, and what to divide their sum by, for a mean weighted by samples.

    In units of the first one's samples: batches of one size are added as they are, while others still compute.
    """
    first = tickets[0].samples
    scales = [ticket.samples / first for ticket in tickets]
    total = sum(scales)
    return scales if weights is None else [scale * w for scale, w in zip(scales, weights, strict=True)], total


def shares_of(tickets: Sequence[Ticket]) -> list[float]:
    """The share of each ticket in the samples of all."""
    total = sum(ticket.samples for ticket in tickets)
    return [ticket.samples / total for ticket in tickets]


def _scaled_sum(grads: list[Tensor | None], scales: list[float]) -> Tensor | None:
    """Σ scale·grad over those that exist, none of which is changed; a single unscaled one is passed on as it is."""
    total: Tensor | None = None
    ours = False  # whether `total` is a tensor of its own
    for grad, scale in zip(grads, scales, strict=True):
        if grad is None:
            continue
        if total is None:
            ours = scale != 1.0
            total = grad * scale if ours else grad
        else:
            total = total.add_(grad, alpha=scale) if ours else total.add(grad, alpha=scale)
            ours = True
    return total
