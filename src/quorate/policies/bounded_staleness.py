"""Bounded staleness, or stale synchronous parallel (Ho et al., 2013)."""

from __future__ import annotations

from typing import ClassVar

from quorate.errors import check_at_least
from quorate.events import Action, Ticket
from quorate.policies.arrival_groups import ArrivalPolicy
from quorate.policies.base import Flag


class BoundedStaleness(ArrivalPolicy):
    """Asynchronous, but no worker starts a step more than `bound` ahead of the slowest live worker.

    A worker's clock counts the gradients it has delivered. During one ticket another worker can deliver at
    most 2·bound+1, so with n workers no applied gradient is staler than (n−1)(2·bound+1) versions.
    """

    name = "bounded"
    colour = "#E69F00"
    flags: ClassVar = {"bound": Flag("Steps a worker may be ahead of the slowest.")}
    steady = True

    def __init__(self, bound: int = 3, staleness_weights: bool = False) -> None:
        super().__init__(staleness_weights)
        self.bound = check_at_least("bound", bound, 0)

    @property
    def per_update(self) -> int:
        return 1

    def reset(self, workers: int) -> None:
        super().reset(workers)
        self._clocks: dict[int, int] = {}  # of every worker ever seen: a worker that returns keeps its clock
        self._at: dict[int, int] = {}  # clock -> live workers there, so that the slowest is known at once
        self._slowest = 0
        self._ahead: dict[int, list[int]] = {}  # clock -> live workers that wait there

    def joined(self, time: float, worker: int) -> list[Action]:
        clock = max(self._clocks.get(worker, 0), self._slowest)
        if not self.live:
            self._slowest = clock
        self.live[worker] = None
        self._clocks[worker] = clock
        self._at[clock] = self._at.get(clock, 0) + 1
        return self.go_on(worker)

    def arrived(self, time: float, ticket: Ticket) -> list[Action]:
        worker, at = ticket.worker, self._at
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        at[clock + 1] = at.get(clock + 1, 0) + 1
        del self.busy[worker]
        self.arrivals.append(ticket)
        actions = [self.apply("on arrival"), *self.go_on(worker)]
        if at[clock] > 1:  # another worker is still at this clock, so the slowest has not changed
            at[clock] -= 1
            return actions
        return actions + self._leave(clock)

    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        if worker not in self.live:
            return []
        clock = self._clocks[worker]
        if worker in self._ahead.get(clock, []):
            self._ahead[clock].remove(worker)
        return [*super().lost(time, worker, tickets), *self._leave(clock)]

    def go_on(self, worker: int) -> list[Action]:
        clock = self._clocks[worker]
        if clock - self._slowest <= self.bound:
            return [self.start(worker)]
        self._ahead.setdefault(clock, []).append(worker)
        return []

    def _leave(self, clock: int) -> list[Action]:
        """One live worker fewer is at `clock`; if it was the slowest, waiting workers may go on."""
        self._at[clock] -= 1
        if not self._at[clock]:
            del self._at[clock]
        actions: list[Action] = []
        while self._at and self._slowest not in self._at:
            self._slowest += 1
            released = self._ahead.pop(self._slowest + self.bound, [])
            actions += [self.start(worker) for worker in released]
        return actions
