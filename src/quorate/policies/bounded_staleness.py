"""Bounded staleness, or stale synchronous parallel (Ho et al., 2013)."""

from __future__ import annotations

from quorate.errors import check_at_least
from quorate.events import Action, Ticket
from quorate.policies._arrivals import ArrivalPolicy


class BoundedStaleness(ArrivalPolicy):
    """Asynchronous, but nobody starts a step more than `bound` ahead of the slowest live worker.

    A worker's clock counts the gradients it has delivered. During one ticket another worker can deliver at
    most 2·bound+1, so with n workers no applied gradient is staler than (n−1)(2·bound+1) versions.
    """

    name = "bounded"
    parameters = ("bound", "staleness_weights")

    def __init__(self, bound: int, staleness_weights: bool = False) -> None:
        super().__init__(staleness_weights)
        self.bound = check_at_least("bound", bound, 0)

    @property
    def per_update(self) -> int:
        return 1

    def _reset(self, workers: int) -> None:
        super()._reset(workers)
        self._clocks: dict[int, int] = {}  # of every worker ever seen: one that returns keeps its clock
        self._at: dict[int, int] = {}  # clock -> live workers there, so that the slowest is known at once
        self._slowest = 0
        self._ahead: dict[int, list[int]] = {}  # clock -> live workers that wait there

    def _joined(self, time: float, worker: int) -> list[Action]:
        clock = max(self._clocks.get(worker, 0), self._slowest)
        if not self._live:
            self._slowest = clock
        self._live[worker] = None
        self._clocks[worker] = clock
        self._at[clock] = self._at.get(clock, 0) + 1
        return self._go_on(worker)

    def _arrived(self, time: float, ticket: Ticket) -> list[Action]:
        worker, at = ticket.worker, self._at
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        at[clock + 1] = at.get(clock + 1, 0) + 1
        del self._busy[worker]
        self._arrivals.append(ticket)
        actions = [self._apply("on arrival"), *self._go_on(worker)]
        if at[clock] > 1:  # somebody else is still there, so the slowest has not changed
            at[clock] -= 1
            return actions
        return actions + self._leave(clock)

    def _lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        if worker not in self._live:
            return []
        clock = self._clocks[worker]
        if worker in self._ahead.get(clock, []):
            self._ahead[clock].remove(worker)
        return [*super()._lost(time, worker, tickets), *self._leave(clock)]

    def _go_on(self, worker: int) -> list[Action]:
        clock = self._clocks[worker]
        if clock - self._slowest <= self.bound:
            return [self._start(worker)]
        self._ahead.setdefault(clock, []).append(worker)
        return []

    def _leave(self, clock: int) -> list[Action]:
        """One live worker fewer is at `clock`; if it was the slowest, others may go on."""
        self._at[clock] -= 1
        if not self._at[clock]:
            del self._at[clock]
        actions: list[Action] = []
        while self._at and self._slowest not in self._at:
            self._slowest += 1
            released = self._ahead.pop(self._slowest + self.bound, [])
            actions += [self._start(worker) for worker in released]
        return actions
