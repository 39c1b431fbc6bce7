"""Matches the messages of processes with the tickets that the coordinator started.

A process computes without being told to, and reports the version on which it computed. So a message may be early (its
ticket is not started yet) or late (its ticket was cancelled long ago). The process may also have continued from another
version than the coordinator assumes, if their messages crossed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

from quorate.data_parallel.batches import LendingLedger
from quorate.data_parallel.control.wire import Message
from quorate.events import Abandoned, Arrived, Event, Parts, Rebound, Refused, Ticket, Withdrawn, WorkerLost


class _Received(NamedTuple):
    time: float
    message: Message


class TicketMatching:
    """The tickets of every worker, and its messages that came before their ticket was started.

    lending: told about the progress of a batch, if the ledger lends batches ahead of tickets.
    in_order: every gradient counts, so each arrival belongs to the worker's oldest ticket.
    """

    def __init__(self, workers: int, lending: LendingLedger | None, *, in_order: bool) -> None:
        self.version = 0  # the newest
        self._in_order = in_order
        self._lending = lending
        self._in_flight: dict[int, Ticket] = {}  # by worker
        #: For each worker: version -> the cancelled ticket, and the time of its cancellation.
        self._cancelled: list[dict[int, tuple[Ticket, float]]] = [{} for _ in range(workers)]
        self._backlog: list[deque[_Received]] = [deque() for _ in range(workers)]
        self._ready: dict[int, None] = {}  # workers with a backlog and a new ticket
        self._waiting = [0] * workers  # arrivals that are not applied or dropped yet
        self._last_arrival: dict[int, Ticket] = {}  # by worker
        self._refused: set[int] = set()  # arrived tickets whose gradient was left out
        self._last_version = [-1] * workers  # of the last gradient of each worker
        self.finished: dict[int, float] = {}  # workers that will bring nothing more -> time of that message

    # ------------------------------------------------------------ from the coordinator

    def start(self, ticket: Ticket) -> None:
        self._in_flight[ticket.worker] = ticket
        self._cancelled[ticket.worker].pop(ticket.version, None)  # present if the ticket was rebound
        if self._backlog[ticket.worker]:
            self._ready[ticket.worker] = None

    def cancel(self, ticket: Ticket, time: float) -> None:
        if self._in_flight.get(ticket.worker) is ticket:
            del self._in_flight[ticket.worker]
            self._cancelled[ticket.worker][ticket.version] = ticket, time
        else:  # its arrival is on the way to the coordinator, which ignores arrivals of cancelled tickets
            self._waiting[ticket.worker] -= 1

    def end(self, ticket: Ticket) -> bool:
        """An arrival is applied or dropped; returns whether its gradient was left out because it held NaN or Inf."""
        self._waiting[ticket.worker] -= 1
        was_refused = ticket.id in self._refused
        self._refused.discard(ticket.id)
        return was_refused

    def leave(self, time: float, beyond: int | None = None) -> list[Event]:
        """The losses of finished workers that still have a ticket, which they will never compute.

        A finished worker without a ticket stays: it has done its part of the open round, or had no batch for it, and
        the policy closes the round only while it counts this worker.

        beyond: only workers that have not computed on this version, which another worker has.
        """
        gone = [worker for worker in self.finished if worker in self._in_flight]
        if beyond is not None:
            gone = [worker for worker in gone if self._last_version[worker] < beyond]
        for worker in gone:
            del self.finished[worker]
        return [WorkerLost(time, worker, (self._in_flight.pop(worker).id,)) for worker in gone]

    def withdraw(self, workers: Collection[int], time: float) -> list[Event]:
        """Withdraw the arrivals of these workers if every one of them waits for its round; otherwise no event."""
        if not all(self._waiting[worker] for worker in workers):
            return []
        return [Withdrawn(time, self._last_arrival[worker]) for worker in workers]

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether an arrival is neither applied nor dropped."""
        return self._waiting[ticket.worker] > 0 and self._last_arrival.get(ticket.worker) is ticket

    def late(self, event: Rebound) -> Event:
        """A ticket cannot be rebound to a closed version: it arrives late instead, and the policy drops it."""
        worker = event.ticket.worker
        return self._arrive(worker, event.time) if self._in_flight.get(worker) is event.ticket else event

    @property
    def any_in_flight(self) -> bool:
        return bool(self._in_flight)

    def waiting_workers(self) -> set[int]:
        """The workers with an arrival that is not used yet."""
        return {
            worker
            for worker, backlog in enumerate(self._backlog)
            if self._waiting[worker] > 0 or any(received.message["kind"] == "arrived" for received in backlog)
        }

    # ------------------------------------------------------------ from the processes

    def said(self, time: float, worker: int, message: Message) -> Iterator[Event]:
        """The events that follow from a message; without its ticket the message waits in the backlog."""
        self._backlog[worker].append(_Received(time, message))
        if message["kind"] == "arrived":
            self._last_version[worker] = message["version"]
        yield from self._read_backlog(worker, time)

    def ready_events(self, time: float) -> list[Event]:
        """The events that follow from the backlog of workers with a new ticket."""
        events: list[Event] = []
        while self._ready:
            worker = next(iter(self._ready))
            del self._ready[worker]
            events += self._read_backlog(worker, time)
        return events

    def _read_backlog(self, worker: int, time: float) -> Iterator[Event]:
        backlog = self._backlog[worker]
        while backlog:
            received = backlog[0]
            kind = received.message["kind"]
            if kind == "finished":
                backlog.clear()
                self.finished[worker] = received.time
            elif kind == "began":
                backlog.popleft()
                if self._lending is not None and self._lending.began(worker, received.message["version"]):
                    yield from self._rebound(worker, time)
            elif self._in_order:
                if worker not in self._in_flight:
                    return
                backlog.popleft()
                arrived = self._arrive(worker, received.time, received.message)
                if kind == "refused":
                    self._refused.add(arrived.ticket.id)
                yield arrived
            else:
                taken, events = self._match(worker, received)
                if taken:
                    backlog.popleft()
                yield from events
                if not taken:
                    return

    def _match(self, worker: int, received: _Received) -> tuple[bool, list[Event]]:
        """Whether this message is used up, and the events that follow from it."""
        time, message = received
        kind, version = message["kind"], message["version"]
        ticket, past = self._in_flight.get(worker), self._cancelled[worker].get(version)
        if past is None and ticket is None and version >= self.version:
            return False, []  # its ticket is not started yet
        if past is None and ticket is not None and version > ticket.version:
            # The process continued from a newer version than the coordinator assumed; this ticket is never computed.
            return False, [self._arrive(worker, time)]
        events: list[Event] = []
        rebound = self._lending is not None and self._lending.done(worker, version)
        if past is not None:
            cancelled, cancelled_at = past
            for older in [one for one in self._cancelled[worker] if one <= version]:
                del self._cancelled[worker][older]
            events.append(Abandoned(time, cancelled, max(0.0, time - cancelled_at)))
            if rebound:
                events += self._rebound(worker, time)
        elif ticket is None:
            pass  # of a closed version, and no ticket waits for it
        elif version == ticket.version and kind == "refused":
            del self._in_flight[worker]
            events.append(Refused(time, ticket))
        elif version == ticket.version and kind == "arrived":
            events.append(self._arrive(worker, time, message))
        elif ticket.version < self.version:  # late, and the policy let it finish: the policy drops it
            events.append(self._arrive(worker, time))
        else:  # abandoned, or computed on the version before, and its round is still open
            events += self._rebound(worker, time)
        return True, events

    def _arrive(self, worker: int, time: float, message: Message | None = None) -> Arrived:
        """The arrival of the worker's ticket. message: the one that brought it, with its timing."""
        ticket = self._in_flight.pop(worker)
        self._waiting[worker] += 1
        self._last_arrival[worker] = ticket
        parts = None
        if message is not None and "compute_s" in message:
            parts = Parts(message.get("data_s", 0.0), message["compute_s"], message.get("transfer_s", 0.0))
        return Arrived(time, ticket, parts)

    def _rebound(self, worker: int, time: float) -> list[Event]:
        ticket = self._in_flight.get(worker)
        return [] if ticket is None else [Rebound(time, ticket)]
