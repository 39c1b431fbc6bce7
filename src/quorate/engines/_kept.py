"""Asynchronous arithmetic: every ticket keeps a gradient of its own, computed at the version it read."""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from quorate.engines._bench import Bench, Strategy
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.learner import all_finite
from quorate.policies import Policy


class _Gradient(NamedTuple):
    grads: list[Tensor | None]
    loss: float
    read_buffers: list[Tensor]  # before its forward pass
    buffers: list[Tensor]  # and after
    read: Flat | None  # the parameters it was computed at, where delay compensation wants them


class _Version(NamedTuple):
    flat: Flat
    buffers: list[Tensor]


class Kept(Strategy):
    """For policies that apply stale or weighted gradients.

    A gradient is computed when its ticket starts, while the parameters it reads are still the newest: so no
    version need be copied, but for policies that start tickets on older ones (`history`).
    """

    arithmetic = "kept"

    def __init__(self, bench: Bench, policy: Policy) -> None:
        super().__init__(bench)
        self._history = policy.history
        self._compensation = self.learner.learning.delay_compensation or 0.0
        self._gradients: dict[int, _Gradient | None] = {}  # None: not finite
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

    def _compute(self, ticket: Ticket) -> _Gradient | None:
        learner, buffers = self.learner, self.bench.buffers
        old = None if ticket.version == learner.version else self._old[ticket.version]
        read_buffers = buffers.newest() if old is None else old.buffers
        if old is not None:
            learner.point_at(old.flat)
            buffers.load(old.buffers)
        loss = self.bench.backward([ticket.batch]).item()
        if old is not None:
            learner.point_at(learner.flat)
        after = buffers.after_forward()
        there = self.bench.gradients()
        grads = [parameter.grad for parameter in learner.params]
        learner.clear_gradients()
        if not math.isfinite(loss) or not all_finite(there):
            return None
        read = self._snapshot(ticket.version) if self._compensation else None
        return _Gradient(grads, loss, read_buffers, after, read)

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
        total = sum(ticket.samples for ticket in tickets)
        shares = [ticket.samples / total for ticket in tickets]
        scales = shares if weights is None else [share * w for share, w in zip(shares, weights, strict=True)]
        if self._compensation:
            for ticket, gradient in zip(tickets, gradients, strict=True):
                self._compensate(ticket, gradient)
        for place, parameter in enumerate(learner.params):
            parameter.grad = _scaled_sum([gradient.grads[place] for gradient in gradients], scales)
        self._keep_newest()
        as_it_was = scales == [1.0] and not self._compensation
        if not as_it_was and not all_finite(learner.gradients()):  # the sum or the compensation overflowed
            learner.clear_gradients()
            learner.skip()
            return Outcome(None, None, tickets)
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

    def _compensate(self, ticket: Ticket, gradient: _Gradient) -> None:
        """DC-ASGD: g + λ·g⊙g⊙(w − w_read), a first-order guess of the gradient at the newest version."""
        if ticket.version == self.learner.version:
            return
        assert gradient.read is not None
        for grad, now, then in zip(gradient.grads, self.learner.flat.views, gradient.read.views, strict=True):
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
