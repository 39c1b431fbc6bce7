"""Asynchronous SGD: every gradient is applied when it arrives."""

from __future__ import annotations

from typing import ClassVar

from quorate.errors import check_at_least
from quorate.events import Action, Apply, Drop, Ticket
from quorate.policies.arrival_groups import ArrivalPolicy
from quorate.policies.base import Flag, without


class Async(ArrivalPolicy):
    """One arrival, one update. With `max_staleness`, a gradient staler than that is dropped.

    The ledger pins a batch that is dropped again and again. The policy then holds other arrivals back rather than
    make the pinned ticket too stale once more.
    """

    name = "async"
    colour = "#009E73"
    flags: ClassVar = {"max_staleness": Flag("Drop gradients that are staler than N versions.", default="no bound")}
    steady = True

    def __init__(self, max_staleness: int | None = None, staleness_weights: bool = False) -> None:
        super().__init__(staleness_weights)
        self.max_staleness = None if max_staleness is None else check_at_least("max_staleness", max_staleness, 0)

    @property
    def per_update(self) -> int:
        return 1

    @property
    def staleness_bound(self) -> int | None:
        return self.max_staleness

    def reset(self, workers: int) -> None:
        super().reset(workers)
        self._pinned: dict[int, int] = {}  # worker -> version read by its pinned ticket
        self._held: list[Ticket] = []  # arrivals that wait for a pinned one

    def arrived(self, time: float, ticket: Ticket) -> list[Action]:
        del self.busy[ticket.worker]
        if not self._pinned:
            return [self._decide(ticket), self.start(ticket.worker)]
        if ticket.worker in self._pinned:
            del self._pinned[ticket.worker]
            return [self._decide(ticket), self.start(ticket.worker), *self._release()]
        self._held.append(ticket)
        return self._release()

    def _decide(self, ticket: Ticket) -> Action:
        """Apply or drop one arrival."""
        staleness = self.version - ticket.version
        if self.max_staleness is not None and staleness > self.max_staleness:
            return Drop(ticket, "too stale")
        weights = (1.0 / max(1, staleness),) if self.staleness_weights else None
        self.version += 1
        return Apply((ticket,), weights, "on arrival")

    def go_on(self, worker: int) -> list[Action]:
        """A worker whose arrival was held may have been lost since, and may be back and busy."""
        return [self.start(worker)] if worker in self.live and worker not in self.busy else []

    def _release(self) -> list[Action]:
        """Apply or drop held arrivals, as long as that makes no pinned ticket too stale."""
        actions: list[Action] = []
        while self._held and not self._pinned_at_bound():
            ticket = self._held.pop(0)
            actions += [self._decide(ticket), *self.go_on(ticket.worker)]
        return actions

    def _pinned_at_bound(self) -> bool:
        assert self.max_staleness is not None, "nothing is dropped, so nothing is pinned"
        return any(self.version - read >= self.max_staleness for read in self._pinned.values())

    def refused(self, time: float, ticket: Ticket) -> list[Action]:
        self._pinned.pop(ticket.worker, None)
        return [*super().refused(time, ticket), *self._release()]

    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        self._pinned.pop(worker, None)
        self._held = without(self._held, tickets)
        return [*super().lost(time, worker, tickets), *self._release()]

    def pinned(self, ticket: Ticket) -> list[Action]:
        if self.max_staleness is not None:
            self._pinned[ticket.worker] = ticket.version
        return []
