"""Synchronous arithmetic: every arrival's backward adds to `.grad`, as gradient accumulation does."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quorate.engines._bench import Bench, Strategy
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.learner import all_finite, squared_norm
from quorate.noise import Norms, is_measured


class Summed(Strategy):
    """For policies that apply only gradients of the newest version, unweighted: none is ever copied.

    A gradient is computed when its ticket arrives, so work that is cancelled costs nothing. A loss that is
    not finite is refused there and then. A gradient that is not finite although its loss is would cost a pass
    over every gradient to find so early; it is found in the sum, before that is applied, and left out.
    """

    arithmetic = "summed"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._clear()

    def _clear(self) -> None:
        self.learner.clear_gradients()
        self._tickets: list[Ticket] = []
        self._scales: list[float] = []  # samples of each arrival, in units of the first one's
        self._losses: list[float] = []
        self._after: list[list[Tensor]] = []
        self._first_sq: float | None = None  # squared norm of the first one's gradient, on measured versions

    def started(self, ticket: Ticket) -> None:
        pass

    def arrived(self, ticket: Ticket) -> bool:
        # A late one can only be dropped, so it is not computed.
        return ticket.version != self.learner.version or self._add(ticket)

    def ended(self, ticket: Ticket, arrived: bool) -> None:
        pass  # `apply` finds out when the sum holds an arrival that it should not

    def _add(self, ticket: Ticket) -> bool:
        """Add one arrival to the sum; False, and the sum is as it was, if its loss is not finite."""
        scale = ticket.samples / self._tickets[0].samples if self._tickets else 1.0
        loss = self.bench.backward([ticket.batch], scale).item()
        after = self.bench.buffers.after_forward()
        if not math.isfinite(loss):
            self._sum_again(self._tickets)
            return False
        if not self._tickets and is_measured(self.learner.version):
            self._first_sq = squared_norm(self.bench.gradients())  # nothing else is in the sum yet
        self._tickets.append(ticket)
        self._scales.append(scale)
        self._losses.append(loss)
        if after:
            self._after.append(after)
        return True

    def _sum_again(self, tickets: list[Ticket]) -> None:
        """Make the sum anew. It is needed so rarely that computing twice beats keeping every gradient."""
        self._clear()
        for ticket in tickets:
            self._add(ticket)

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None = None) -> Outcome:
        assert weights is None, "weighted gradients are kept apart, not summed"
        if list(tickets) != self._tickets:
            self._sum_again(list(tickets))
        grads = self.bench.gradients()
        return self._step(grads) if all_finite(grads) else self._leave_out(list(tickets))

    def _step(self, grads: list[Tensor]) -> Outcome:
        total = sum(self._scales)
        if total != 1.0:
            torch._foreach_div_(grads, total)
        shares = [scale / total for scale in self._scales]
        loss = sum(share * loss for share, loss in zip(shares, self._losses, strict=True))
        self.bench.buffers.advance(self._after, shares)
        norm = self.learner.norm_for_clipping()
        norms = self._norms(grads)
        self.learner.step(norm)
        self._clear()
        return Outcome(loss, norm, norms=norms)

    def _norms(self, mean: list[Tensor]) -> Norms | None:
        if self._first_sq is None or len(self._tickets) < 2:
            return None
        samples = sum(ticket.samples for ticket in self._tickets)
        return Norms(self._first_sq, self._tickets[0].samples, squared_norm(mean), samples)

    def _leave_out(self, tickets: list[Ticket]) -> Outcome:
        """Some gradient is not finite: find out which, one by one, and apply the others."""
        finite = []
        for ticket in tickets:
            self._sum_again([ticket])
            if self._tickets and all_finite(self.bench.gradients()):
                finite.append(ticket)
        refused = tuple(ticket for ticket in tickets if ticket not in finite)
        self._sum_again(finite)
        if not finite or not all_finite(self.bench.gradients()):  # or it is their sum that overflows
            return self._nothing(tuple(tickets))
        return self._step(self.bench.gradients())._replace(refused=refused)

    def _nothing(self, refused: tuple[Ticket, ...]) -> Outcome:
        """An update of nothing; the version counts all the same, since the policy has moved on."""
        self._clear()
        self.learner.skip()
        return Outcome(None, None, refused)

    def apply_one_by_one(self, tickets: tuple[Ticket, ...]) -> Outcome:
        """Compute and apply in one go, whatever was summed before."""
        self._clear()
        refused = tuple(ticket for ticket in tickets if not self._add(ticket))
        kept = tuple(ticket for ticket in tickets if ticket not in refused)
        if not kept:
            return self._nothing(refused)
        outcome = self.apply(kept)
        return outcome._replace(refused=refused + outcome.refused)
