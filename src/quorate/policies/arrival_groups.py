"""Base class of asynchronous policies: workers never wait for each other; arrivals are applied in groups."""

from __future__ import annotations

from typing import ClassVar

from quorate.events import Action, Apply, Start, Ticket
from quorate.policies.base import Flag, Policy, without


class ArrivalPolicy(Policy):
    """Every `per_update` arrivals make a version, whichever versions they read; a worker goes on at once."""

    flags: ClassVar = {"staleness_weights": Flag("Scale gradients by 1/staleness.")}
    #: Scale each gradient by 1/staleness (Zhang et al., 2016), so that the stalest count least.
    staleness_weights: bool = False

    def __init__(self, staleness_weights: bool = False) -> None:
        self.staleness_weights = staleness_weights

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        return self.staleness_weights

    @property
    def staleness_bound(self) -> int | None:
        return None

    @property
    def needed(self) -> int:
        return 1

    def reset(self, workers: int) -> None:
        self.version = 0
        self.live: dict[int, None] = {}
        self.busy: dict[int, None] = {}
        self.idle: dict[int, None] = {}  # live, but there was no batch left for them
        self.arrivals: list[Ticket] = []

    # ------------------------------------------------------------ events

    def arrived(self, time: float, ticket: Ticket) -> list[Action]:
        del self.busy[ticket.worker]
        self.arrivals.append(ticket)
        if len(self.arrivals) >= self.per_update:
            return [self.apply("enough arrivals"), *self.go_on(ticket.worker)]
        return self.go_on(ticket.worker)

    def refused(self, time: float, ticket: Ticket) -> list[Action]:
        del self.busy[ticket.worker]
        return [self.start(ticket.worker)]

    def joined(self, time: float, worker: int) -> list[Action]:
        self.live[worker] = None
        return [self.start(worker)]

    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        self.live.pop(worker, None)
        self.busy.pop(worker, None)
        self.idle.pop(worker, None)
        self.arrivals = without(self.arrivals, tickets)
        # The lost batches are back in the ledger, so as many idle workers can start.
        return [self.start(other) for other in list(self.idle)[: len(tickets)]]

    def exhausted(self, time: float, worker: int) -> list[Action]:
        del self.busy[worker]
        self.idle[worker] = None
        if self.arrivals and not self.busy:
            return [self.apply("all that was left of the epoch")]
        return []

    def pinned(self, ticket: Ticket) -> list[Action]:
        return []  # no arrival is dropped here, so an update need not wait for the batch

    # ------------------------------------------------------------ parts

    def go_on(self, worker: int) -> list[Action]:
        """The actions for a worker whose gradient has arrived."""
        return [self.start(worker)]

    def start(self, worker: int) -> Action:
        self.idle.pop(worker, None)
        self.busy[worker] = None
        return Start(worker, self.version, None)

    def apply(self, reason: str) -> Action:
        tickets = tuple(self.arrivals)
        self.arrivals = []
        weights = None
        if self.staleness_weights:
            weights = tuple(1.0 / max(1, self.version - ticket.version) for ticket in tickets)
        self.version += 1
        return Apply(tickets, weights, reason)
