"""Asynchronous arithmetic: every arrival keeps a gradient of its own, computed at the version it read."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from quorate.engines._bench import Bench, Strategy
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.learner import all_finite, global_norm
from quorate.policies import Policy


class _Arrival(NamedTuple):
    grads: list[Tensor | None]
    read_buffers: list[Tensor]  # before its forward pass
    buffers: list[Tensor]  # and after
    loss: float


class _Version(NamedTuple):
    flat: Flat
    buffers: list[Tensor]


class Kept(Strategy):
    """For policies that apply stale or weighted gradients.

    A version's parameters are copied only when the next is made while a ticket in flight still reads them
    (or may be started on them); the copies are used again and again.
    """

    arithmetic = "kept"

    def __init__(self, bench: Bench, policy: Policy) -> None:
        super().__init__(bench)
        self._bound, self._history = policy.staleness_bound, policy.history
        self._compensation = self.learner.learning.delay_compensation or 0.0
        self._arrivals: dict[int, _Arrival] = {}
        self._readers: dict[int, int] = {}  # version -> open tickets that need it
        self._old: dict[int, _Version] = {}
        self._spare: list[Flat] = []

    def started(self, ticket: Ticket) -> None:
        self._readers[ticket.version] = self._readers.get(ticket.version, 0) + 1

    def arrived(self, ticket: Ticket) -> bool:
        too_stale = self._bound is not None and self.learner.version - ticket.version > self._bound
        arrival = None if too_stale else self._compute(ticket)  # what can only be dropped is not computed
        if arrival is not None:
            self._arrivals[ticket.id] = arrival
        if arrival is None or not self._compensation:  # DC-ASGD needs w_read once more
            self._release(ticket)
        return too_stale or arrival is not None

    def ended(self, ticket: Ticket, arrived: bool) -> None:
        kept = self._arrivals.pop(ticket.id, None)
        if not arrived or (kept is not None and self._compensation):
            self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        """One ticket that needs a version fewer."""
        self._readers[ticket.version] -= 1
        if not self._readers[ticket.version]:
            del self._readers[ticket.version]
            self._recycle()

    def _recycle(self) -> None:
        first = self.learner.version - self._history
        for version in [old for old in self._old if old not in self._readers and old < first]:
            self._spare.append(self._old.pop(version).flat)

    # ------------------------------------------------------------ computing

    def _compute(self, ticket: Ticket) -> _Arrival | None:
        learner, buffers = self.learner, self.bench.buffers
        old = self._old[ticket.version] if ticket.version != learner.version else None
        read_buffers = buffers.newest() if old is None else old.buffers
        if old is not None:
            learner.point_at(old.flat)
            buffers.load(old.buffers)
        loss = float(self.bench.backward([ticket.batch]))
        if old is not None:
            learner.point_at(learner.flat)
        after = buffers.after_forward()
        grads = [parameter.grad for parameter in learner.params]
        there = self.bench.gradients()
        learner.clear_gradients()
        finite = math.isfinite(loss) and (math.isfinite(global_norm(there)) or all_finite(there))
        return _Arrival(grads, read_buffers, after, loss) if finite else None

    # ------------------------------------------------------------ applying

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        learner = self.learner
        arrivals = [self._arrivals.pop(ticket.id) for ticket in tickets]
        total = sum(ticket.samples for ticket in tickets)
        shares = [ticket.samples / total for ticket in tickets]
        if self._compensation:
            for ticket, arrival in zip(tickets, arrivals, strict=True):
                self._compensate(ticket, arrival)
        scales = shares if weights is None else [share * w for share, w in zip(shares, weights, strict=True)]
        for place, parameter in enumerate(learner.params):
            parameter.grad = _scaled_sum([arrival.grads[place] for arrival in arrivals], scales)
        loss = sum(share * arrival.loss for share, arrival in zip(shares, arrivals, strict=True))
        norm = global_norm(learner.gradients())
        self._keep(learner.version)
        read = [
            None if ticket.version == learner.version else arrival.read_buffers
            for ticket, arrival in zip(tickets, arrivals, strict=True)
        ]
        self.bench.buffers.advance([arrival.buffers for arrival in arrivals], shares, read)
        learner.step(norm)
        learner.clear_gradients()
        if self._compensation:
            for ticket in tickets:
                self._release(ticket)
        self._recycle()
        return Outcome(loss, norm)

    def _keep(self, version: int) -> None:
        """Copy the newest version before it is overwritten, if somebody will still want it."""
        if version in self._readers or self._history:
            flat = self._spare.pop() if self._spare else self.learner.flat.like()
            flat.buffer.copy_(self.learner.flat.buffer)
            self._old[version] = _Version(flat, self.bench.buffers.newest())

    def _compensate(self, ticket: Ticket, arrival: _Arrival) -> None:
        """DC-ASGD: g + λ·g⊙g⊙(w − w_read), a first-order guess of the gradient at the newest version."""
        if ticket.version == self.learner.version:
            return
        read = self._old[ticket.version].flat.views
        for grad, now, then in zip(arrival.grads, self.learner.flat.views, read, strict=True):
            if grad is not None:
                grad.add_(grad * grad * (now - then), alpha=self._compensation)


def _scaled_sum(grads: list[Tensor | None], scales: list[float]) -> Tensor | None:
    """Σ scale·grad over those that exist; a single unscaled one is passed on as it is."""
    total: Tensor | None = None
    for grad, scale in zip(grads, scales, strict=True):
        if grad is None:
            continue
        if total is None:
            total = grad if scale == 1.0 else grad * scale
        else:
            total = total.add_(grad, alpha=scale)
    return total
