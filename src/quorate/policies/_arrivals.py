"""The asynchronous family: workers never wait for each other; arrivals are applied in groups as they come."""

from __future__ import annotations

from quorate.events import Action, Apply, Start, Ticket
from quorate.policies._base import Policy, without


class ArrivalPolicy(Policy):
    """Every `per_update` arrivals make a version, whatever versions they read; a worker goes on at once."""

    def __init__(self, staleness_weights: bool = False) -> None:
        #: Scale each gradient by 1/staleness (Zhang et al., 2016), so that the stalest count least.
        self.staleness_weights = staleness_weights

    @property
    def staleness_bound(self) -> int | None:
        return None

    @property
    def needed(self) -> int:
        return 1

    def _reset(self, workers: int) -> None:
        self._version = 0
        self._live: dict[int, None] = {}
        self._busy: dict[int, None] = {}
        self._idle: dict[int, None] = {}  # live, but there was no batch left for them
        self._arrivals: list[Ticket] = []

    # ------------------------------------------------------------ events

    def _arrived(self, time: float, ticket: Ticket) -> list[Action]:
        del self._busy[ticket.worker]
        self._arrivals.append(ticket)
        if len(self._arrivals) >= self.per_update:
            return [self._apply("enough arrivals"), *self._go_on(ticket.worker)]
        return self._go_on(ticket.worker)

    def _refused(self, time: float, ticket: Ticket) -> list[Action]:
        del self._busy[ticket.worker]
        return [self._start(ticket.worker)]

    def _joined(self, time: float, worker: int) -> list[Action]:
        self._live[worker] = None
        return [self._start(worker)]

    def _lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        self._live.pop(worker, None)
        self._busy.pop(worker, None)
        self._idle.pop(worker, None)
        self._arrivals = without(self._arrivals, tickets)
        # Its batches are back: as many of those without work can have them.
        return [self._start(other) for other in list(self._idle)[: len(tickets)]]

    def _exhausted(self, time: float, worker: int) -> list[Action]:
        del self._busy[worker]
        self._idle[worker] = None
        if self._arrivals and not self._busy:
            return [self._apply("all that was left of the epoch")]
        return []

    def _pinned_started(self, ticket: Ticket) -> list[Action]:
        return []  # nothing is dropped here, so nothing need be waited for

    # ------------------------------------------------------------ parts

    def _go_on(self, worker: int) -> list[Action]:
        """What a worker does that has delivered."""
        return [self._start(worker)]

    def _start(self, worker: int) -> Action:
        self._idle.pop(worker, None)
        self._busy[worker] = None
        return Start(worker, self._version, None)

    def _apply(self, reason: str) -> Action:
        tickets = tuple(self._arrivals)
        self._arrivals = []
        weights = None
        if self.staleness_weights:
            weights = tuple(1.0 / max(1, self._version - ticket.version) for ticket in tickets)
        self._version += 1
        return Apply(tickets, weights, reason)
