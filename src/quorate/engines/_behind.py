"""A delayed round as one big batch, computed when it is applied, at the older version that its workers read."""

from __future__ import annotations

import math

from quorate.engines._bench import Bench
from quorate.engines._groups import has_batch_norm
from quorate.engines._kept import Kept
from quorate.engines._together import Together, compute_together
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.policies import Policy


class TogetherBehind(Kept):
    """For policies whose updates are rounds of one version that is not the newest.

    The last versions are kept anyway for tickets that are yet to start, so a round can wait with its arithmetic
    until it is applied. Where it cannot be one batch, or holds NaN or Inf, its gradients are computed one by one
    there and then, and what is finite is applied. Delay compensation wants every gradient by itself: not here.
    """

    arithmetic = Together.arithmetic

    def __init__(self, bench: Bench, policy: Policy) -> None:
        super().__init__(bench, policy)
        assert not self._compensation, "compensated gradients are kept apart"
        self._has_batch_norm = has_batch_norm(bench.learner.model)

    def started(self, ticket: Ticket) -> None:
        pass

    def arrived(self, ticket: Ticket) -> bool:
        return True

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        learner, buffers = self.learner, self.bench.buffers
        # BatchNorm's groups are of one size.
        uneven = self._has_batch_norm and len({ticket.samples for ticket in tickets}) > 1
        if len(tickets) == 1 or weights is not None or uneven:
            return self._one_by_one(tickets, weights)
        version = tickets[0].version
        assert all(ticket.version == version for ticket in tickets), "a round reads one version"
        with self._reading(version) as read_buffers:
            loss, norm = compute_together(self.bench, tickets)
            after = buffers.after_forward()
        if not math.isfinite(loss) or not math.isfinite(norm):
            learner.clear_gradients()
            return self._one_by_one(tickets, weights)
        self._keep_newest()
        buffers.advance([after], [1.0], [None if version == learner.version else read_buffers])
        learner.step(norm)
        learner.clear_gradients()
        return Outcome(loss, norm)

    def _one_by_one(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        kept = []
        for place, ticket in enumerate(tickets):
            gradient = self._compute(ticket)
            if gradient is not None:
                self._gradients[ticket.id] = gradient
                kept.append(place)
        refused = tuple(ticket for place, ticket in enumerate(tickets) if place not in kept)
        if not kept:
            self._keep_newest()
            self.learner.skip()
            return Outcome(None, None, refused)
        good = tuple(tickets[place] for place in kept)
        outcome = super().apply(good, None if weights is None else tuple(weights[place] for place in kept))
        return outcome._replace(refused=refused + outcome.refused)
