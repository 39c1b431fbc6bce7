"""Synchronous arithmetic: every arrival's backward adds to `.grad`, as gradient accumulation does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quorate.engines._bench import Bench, Strategy
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.learner import all_finite, global_norm


class Summed(Strategy):
    """For policies that apply only gradients of the newest version, unweighted: no gradient is ever copied."""

    arithmetic = "summed"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._clear()

    def _clear(self) -> None:
        self.learner.clear_gradients()
        self._tickets: list[Ticket] = []
        self._scales: list[float] = []  # samples of each arrival, in units of the first one's
        self._losses: list[float] = []
        self._norm = 0.0  # of the sum so far
        self._after: list[list[Tensor]] = []

    def started(self, ticket: Ticket) -> None:
        pass

    def arrived(self, ticket: Ticket) -> bool:
        # A late one can only be dropped, so it is not computed.
        return ticket.version != self.learner.version or self.add(ticket)

    def ended(self, ticket: Ticket, arrived: bool) -> None:
        pass  # `apply` finds out when the sum holds an arrival that it should not

    def add(self, ticket: Ticket) -> bool:
        """Add one arrival to the sum; if it is not finite, leave the sum as it was and give False."""
        scale = ticket.samples / self._tickets[0].samples if self._tickets else 1.0
        loss = float(self.bench.backward([ticket.batch], scale))
        after = self.bench.buffers.after_forward()
        grads = self.bench.gradients()
        norm = global_norm(grads)
        if not math.isfinite(loss) or not (math.isfinite(norm) or all_finite(grads)):
            self.sum_again(self._tickets)
            return False
        self._tickets.append(ticket)
        self._scales.append(scale)
        self._losses.append(loss)
        self._norm = norm
        if after:
            self._after.append(after)
        return True

    def sum_again(self, tickets: Sequence[Ticket]) -> None:
        """Make the sum anew. It is needed so rarely that computing twice beats keeping every gradient."""
        self._clear()
        for ticket in tickets:
            if not self.add(ticket):
                raise AssertionError(f"the gradient of {ticket} was finite, and is not when computed again")

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None = None) -> Outcome:
        assert weights is None, "weighted gradients are kept apart, not summed"
        if list(tickets) != self._tickets:
            self.sum_again(tickets)
        total = sum(self._scales)
        if total != 1.0:
            torch._foreach_div_(self.learner.gradients(), total)
        shares = [scale / total for scale in self._scales]
        loss = sum(share * loss for share, loss in zip(shares, self._losses, strict=True))
        norm = self._norm / total
        self.bench.buffers.advance(self._after, shares)
        self.learner.step(norm)
        self._clear()
        return Outcome(loss, norm)
