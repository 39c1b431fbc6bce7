"""Policies as a user would write them, outside of quorate."""

from __future__ import annotations

from collections.abc import Iterable

import quorate
from quorate.events import Action, Apply, Choose, Start, Ticket


class WarmUpBackup(quorate.RoundPolicy):
    """Every worker in the first updates; after that, the first `quorum`."""

    steady = False

    def __init__(self, quorum: int, warm_up: int = 3, late: str = "cancel") -> None:
        super().__init__(late)
        self.quorum, self.warm_up = quorum, warm_up

    @property
    def per_update(self) -> int:
        return self.workers if self.version < self.warm_up else self.quorum

    def opened(self, time: float) -> list[Action]:
        return [Choose(self.per_update, "warming up or not")] if self.version in (0, self.warm_up) else []


class NewestCountsMost(quorate.ArrivalPolicy):
    """Pairs of gradients; of two, the fresher one has most of the weight."""

    weighs = True  # type: ignore[assignment]

    @property
    def per_update(self) -> int:
        return 2

    def apply(self, reason: str) -> Action:
        applied = super().apply(reason)
        assert isinstance(applied, Apply)
        weights = tuple(1.5 if ticket.version == self.version - 1 else 0.5 for ticket in applied.tickets)
        return applied._replace(weights=weights)


class FromScratch(quorate.Policy):
    """Every gradient makes an update, whatever it read; every hook written out, and state without underscores."""

    staleness_bound = None
    per_update = 1
    needed = 1

    def reset(self, workers: int) -> None:
        self.updates, self.seen, self.waiting = 0, set(), []

    def begin_work(self, worker: int) -> Action:
        self.seen.add(worker)
        return Start(worker, self.updates, None)

    def joined(self, time: float, worker: int) -> Iterable[Action]:
        yield self.begin_work(worker)

    def arrived(self, time: float, ticket: Ticket) -> Iterable[Action]:
        self.updates += 1
        yield Apply((ticket,), None, "it is there")
        yield self.begin_work(ticket.worker)

    def refused(self, time: float, ticket: Ticket) -> Iterable[Action]:
        yield self.begin_work(ticket.worker)

    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> Iterable[Action]:
        idle = self.waiting[: len(tickets)]
        del self.waiting[: len(tickets)]
        return [self.begin_work(other) for other in idle if other != worker]

    def exhausted(self, time: float, worker: int) -> None:  # type: ignore[override]
        self.waiting.append(worker)

    def pinned(self, ticket: Ticket) -> list[Action]:
        return []


OWN = [WarmUpBackup(3), WarmUpBackup(2, warm_up=0, late="finish"), NewestCountsMost(), FromScratch()]
