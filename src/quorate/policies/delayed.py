"""Delayed synchronous SGD (AGD-k of Daily et al., 2017): each gradient is computed k versions back."""

from __future__ import annotations

from typing import ClassVar

from quorate.errors import check_at_least
from quorate.events import Action, Apply, Cancel, Drop, Start, Ticket
from quorate.policies.base import LATE_FLAG, Flag, Policy, check_late, choose, without


class Delayed(Policy):
    """Update i averages gradients that every worker computed at version i − `delay`.

    So a worker may be up to `delay` iterations ahead of the slowest, and an update overlaps with the next
    computation. The first iterations read version 0. The engine keeps the last `delay` versions.

    warm_up: number of updates in which the delay grows from 0 to `delay`, step by step: the first updates of a
    training are large, and stale gradients harm them most.
    """

    name = "delayed"
    colour = "#000000"
    flags: ClassVar = {
        "delay": Flag("Versions an update lags behind."),
        "late": LATE_FLAG,
        "warm_up": Flag("Updates over which the delay grows from 0 to --delay."),
    }
    collective = takes_everybody = True

    def __init__(self, delay: int = 1, late: str = "cancel", warm_up: int = 0) -> None:
        self.delay = check_at_least("delay", delay, 0)
        self.late = check_late(late)
        self.warm_up = check_at_least("warm_up", warm_up, 0)
        self.history = delay

    def delay_at(self, iteration: int) -> int:
        most = min(self.delay, iteration)
        return most if iteration >= self.warm_up else min(most, iteration * (self.delay + 1) // self.warm_up)

    @property
    def staleness_bound(self) -> int:
        return self.delay

    @property
    def per_update(self) -> int:
        return self.workers

    @property
    def needed(self) -> int:
        return self.workers

    def reset(self, workers: int) -> None:
        self.workers = workers
        self.version = 0  # also the iteration whose round closes next
        self.live: dict[int, None] = {}
        self._next: dict[int, int] = {}  # worker -> its next iteration; kept while it is lost
        self.busy: dict[int, int] = {}  # worker -> iteration it computes
        self.idle: dict[int, int] = {}  # worker -> iteration the epoch had no batch for
        self.arrivals: dict[int, list[Ticket]] = {}  # iteration -> its arrivals
        self._in_flight: dict[int, int] = {}  # iteration -> number of workers that compute it
        self._pinned: dict[int, int] = {}  # worker -> iteration that must wait for it
        self._must: dict[int, None] = {}  # arrived tickets that their round must take

    # ------------------------------------------------------------ events

    def arrived(self, time: float, ticket: Ticket) -> list[Action]:
        if ticket.worker in self._pinned:
            self._must[ticket.id] = None
        iteration = self.stop(ticket.worker)
        self._next[ticket.worker] = iteration + 1
        if iteration < self.version:
            return [Drop(ticket, "late: its version is over"), *self._start_free([ticket.worker])]
        self.arrivals.setdefault(iteration, []).append(ticket)
        return self._advance([ticket.worker])

    def refused(self, time: float, ticket: Ticket) -> list[Action]:
        self.stop(ticket.worker)
        return self._start_free([ticket.worker])

    def joined(self, time: float, worker: int) -> list[Action]:
        self.live[worker] = None
        return self._start_free([worker])

    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        self.live.pop(worker, None)
        self.idle.pop(worker, None)
        if worker in self.busy:
            self.stop(worker)
        for iteration, arrivals in self.arrivals.items():
            for ticket in arrivals:
                if ticket.id in tickets:  # its worker has to compute the iteration again
                    self._next[ticket.worker] = min(self._next[ticket.worker], iteration)
            self.arrivals[iteration] = without(arrivals, tickets)
        if self.idle and tickets:  # the lost batches are back in the ledger, so as many idle workers can start
            others = list(self.idle)[: len(tickets)]
            for other in others:
                del self.idle[other]
            return self._start_free(others)
        return self._advance([])

    def exhausted(self, time: float, worker: int) -> list[Action]:
        self.idle[worker] = self.stop(worker)
        if not self.busy and not any(self.arrivals.values()):  # every batch was given up: try the next epoch
            self.idle.clear()
            return self._start_free(list(self.live))
        return self._advance([])

    def pinned(self, ticket: Ticket) -> list[Action]:
        self._pinned[ticket.worker] = self.busy[ticket.worker]
        return []

    # ------------------------------------------------------------ parts

    def _advance(self, free: list[int]) -> list[Action]:
        """Close every round that is complete, oldest first; then start the free workers that may go on."""
        actions: list[Action] = []
        while self.complete():
            iteration = self.version
            arrivals = self.arrivals.pop(iteration)
            tickets, surplus = choose(arrivals, self.workers, self._must)
            reason = "quorum reached" if len(tickets) == self.workers else "all that was left of the epoch"
            actions += [Apply(tuple(tickets), None, reason), *surplus]
            for ticket in arrivals:
                self._must.pop(ticket.id, None)
            late = [worker for worker, busy in self.busy.items() if busy <= iteration]
            if self.late == "cancel":
                for worker in late:
                    self.stop(worker)
                    actions.append(Cancel(worker, "late: its version is over"))
            self.version += 1
            for worker in [worker for worker, idle in self.idle.items() if idle <= iteration]:
                del self.idle[worker]
                self._next[worker] = self.version
            free = list(self.live)
        return actions + self._start_free(free)

    def complete(self) -> bool:
        iteration = self.version
        have = len(self.arrivals.get(iteration, ()))
        if not have or iteration in self._pinned.values():
            return False
        drained = not self._in_flight.get(iteration) and iteration in self.idle.values()
        return have >= self.workers or (drained and all(self._was_asked(worker) for worker in self.live))

    def _was_asked(self, worker: int) -> bool:
        """Whether a worker is at work, has done its part of the open round, or found no batch for it.

        A worker that has just finished the round before may still find a batch, although another worker found none.
        """
        return worker in self.busy or worker in self.idle or self._next.get(worker, 0) > self.version

    def _start_free(self, workers: list[int]) -> list[Action]:
        actions: list[Action] = []
        for worker in workers:
            iteration = max(self._next.get(worker, 0), self.version)
            if worker in self.busy or worker in self.idle or iteration > self.version + self.delay_at(iteration):
                continue
            self._next[worker] = self.busy[worker] = iteration
            self._in_flight[iteration] = self._in_flight.get(iteration, 0) + 1
            actions.append(Start(worker, iteration - self.delay_at(iteration), iteration))
        return actions

    def stop(self, worker: int) -> int:
        """A worker's ticket ended; returns the iteration it was for."""
        iteration = self.busy.pop(worker)
        self._pinned.pop(worker, None)
        self._in_flight[iteration] -= 1
        if not self._in_flight[iteration]:
            del self._in_flight[iteration]
        return iteration
