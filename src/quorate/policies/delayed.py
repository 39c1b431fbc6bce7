"""Delayed synchronous SGD (AGD-k of Daily et al., 2017): each gradient is computed k versions back."""

from __future__ import annotations

from quorate.errors import check_at_least
from quorate.events import Action, Apply, Cancel, Drop, Start, Ticket
from quorate.policies._base import Policy, check_late, choose, without


class Delayed(Policy):
    """Update i averages gradients that every worker computed at version i − `delay`.

    A worker may so be up to `delay` iterations ahead of the slowest, and an update hides behind the next
    computation. The first iterations read version 0. The engine keeps the last `delay` versions.

    warm_up: over so many updates the delay grows from 0, step by step, to what it is: the first updates of a
    training are large, and stale gradients harm them most.
    """

    name = "delayed"
    parameters = ("delay", "late", "warm_up")

    def __init__(self, delay: int, late: str = "cancel", warm_up: int = 0) -> None:
        self.delay = check_at_least("delay", delay, 0)
        self.late = check_late(late)
        self.warm_up = check_at_least("warm_up", warm_up, 0)
        self.history = delay

    def delay_at(self, iteration: int) -> int:
        """How many versions back the gradients of this iteration are computed.

        It grows by at most one an iteration, so a later iteration never reads an earlier version.
        """
        most = min(self.delay, iteration)
        return most if iteration >= self.warm_up else min(most, iteration * (self.delay + 1) // self.warm_up)

    @property
    def staleness_bound(self) -> int:
        return self.delay

    @property
    def per_update(self) -> int:
        return self._workers

    @property
    def needed(self) -> int:
        return self._workers

    def _reset(self, workers: int) -> None:
        self._workers = workers
        self._version = 0  # also the iteration whose round closes next
        self._live: dict[int, None] = {}
        self._next: dict[int, int] = {}  # worker -> its next iteration; kept while it is lost
        self._busy: dict[int, int] = {}  # worker -> iteration it computes
        self._idle: dict[int, int] = {}  # worker -> iteration the epoch had no batch for
        self._arrivals: dict[int, list[Ticket]] = {}  # iteration -> its arrivals
        self._in_flight: dict[int, int] = {}  # iteration -> how many compute it
        self._pinned: dict[int, int] = {}  # worker -> iteration that must wait for it
        self._must: dict[int, None] = {}  # arrived tickets that their round must take

    # ------------------------------------------------------------ events

    def _arrived(self, time: float, ticket: Ticket) -> list[Action]:
        if ticket.worker in self._pinned:
            self._must[ticket.id] = None
        iteration = self._stop(ticket.worker)
        self._next[ticket.worker] = iteration + 1
        if iteration < self._version:
            return [Drop(ticket, "late: its version is over"), *self._start_free([ticket.worker])]
        self._arrivals.setdefault(iteration, []).append(ticket)
        return self._advance([ticket.worker])

    def _refused(self, time: float, ticket: Ticket) -> list[Action]:
        self._stop(ticket.worker)
        return self._start_free([ticket.worker])

    def _joined(self, time: float, worker: int) -> list[Action]:
        self._live[worker] = None
        return self._start_free([worker])

    def _lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        self._live.pop(worker, None)
        self._idle.pop(worker, None)
        if worker in self._busy:
            self._stop(worker)
        for iteration, arrivals in self._arrivals.items():
            for ticket in arrivals:
                if ticket.id in tickets:  # whoever brought it has to bring it again
                    self._next[ticket.worker] = min(self._next[ticket.worker], iteration)
            self._arrivals[iteration] = without(arrivals, tickets)
        if self._idle and tickets:  # its batches are back: as many of those without work can have them
            others = list(self._idle)[: len(tickets)]
            for other in others:
                del self._idle[other]
            return self._start_free(others)
        return self._advance([])

    def _exhausted(self, time: float, worker: int) -> list[Action]:
        self._idle[worker] = self._stop(worker)
        if not self._busy and not any(self._arrivals.values()):  # all was given up: try the next epoch
            self._idle.clear()
            return self._start_free(list(self._live))
        return self._advance([])

    def _pinned_started(self, ticket: Ticket) -> list[Action]:
        self._pinned[ticket.worker] = self._busy[ticket.worker]
        return []

    # ------------------------------------------------------------ parts

    def _advance(self, free: list[int]) -> list[Action]:
        """Close every round that is complete, oldest first; then start whoever may go on."""
        actions: list[Action] = []
        while self._complete():
            iteration = self._version
            arrivals = self._arrivals.pop(iteration)
            tickets, surplus = choose(arrivals, self._workers, self._must)
            reason = "quorum reached" if len(tickets) == self._workers else "all that was left of the epoch"
            actions += [Apply(tuple(tickets), None, reason), *surplus]
            for ticket in arrivals:
                self._must.pop(ticket.id, None)
            late = [worker for worker, busy in self._busy.items() if busy <= iteration]
            if self.late == "cancel":
                for worker in late:
                    self._stop(worker)
                    actions.append(Cancel(worker, "late: its version is over"))
            self._version += 1
            for worker in [worker for worker, idle in self._idle.items() if idle <= iteration]:
                del self._idle[worker]
                self._next[worker] = self._version
            free = list(self._live)
        return actions + self._start_free(free)

    def _complete(self) -> bool:
        iteration = self._version
        have = len(self._arrivals.get(iteration, ()))
        if not have or iteration in self._pinned.values():
            return False
        drained = not self._in_flight.get(iteration) and iteration in self._idle.values()
        return have >= self._workers or (drained and all(self._was_asked(worker) for worker in self._live))

    def _was_asked(self, worker: int) -> bool:
        """Whether it is at work, has done its part of the open round, or had no batch for it.

        Whoever has just ended the round before may well have one, though another had none.
        """
        return worker in self._busy or worker in self._idle or self._next.get(worker, 0) > self._version

    def _start_free(self, workers: list[int]) -> list[Action]:
        actions: list[Action] = []
        for worker in workers:
            iteration = max(self._next.get(worker, 0), self._version)
            if worker in self._busy or worker in self._idle or iteration > self._version + self.delay_at(iteration):
                continue
            self._next[worker] = self._busy[worker] = iteration
            self._in_flight[iteration] = self._in_flight.get(iteration, 0) + 1
            actions.append(Start(worker, iteration - self.delay_at(iteration), iteration))
        return actions

    def _stop(self, worker: int) -> int:
        """A worker's ticket ended; gives the iteration it was for."""
        iteration = self._busy.pop(worker)
        self._pinned.pop(worker, None)
        self._in_flight[iteration] -= 1
        if not self._in_flight[iteration]:
            del self._in_flight[iteration]
        return iteration
