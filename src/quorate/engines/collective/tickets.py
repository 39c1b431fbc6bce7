"""Which ticket a process means: matches what processes say with the tickets that the coordinator started.

A process computes without being told to, and says on which version it did. So what it says may be early (its ticket
is not started yet) or late (its ticket was cancelled long ago), and it may have gone on from another version than
the coordinator thinks, where both were busy at that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from quorate.engines.collective.control.wire import Message
from quorate.events import Abandoned, Arrived, Event, Parts, Rebound, Refused, Ticket, WorkerLost


class _Said(NamedTuple):
    time: float
    message: Message


class Book:
    """The tickets of every worker, and what it said that no ticket was there for yet.

    ledger: told what became of a batch, where it wants to know (`done`, `began`).
    in_order: every gradient counts, so that what a worker brings is always for its oldest ticket.
    """

    def __init__(self, workers: int, ledger: Any, *, in_order: bool) -> None:
        self.version = 0  # the newest
        self._in_order = in_order
        self._done = getattr(ledger, "done", None)
        self._began = getattr(ledger, "began", None)
        self._flying: dict[int, Ticket] = {}
        self._cancelled: list[dict[int, tuple[Ticket, float]]] = [{} for _ in range(workers)]  # by version; and when
        self._said: list[deque[_Said]] = [deque() for _ in range(workers)]
        self._ready: dict[int, None] = {}  # workers with a new ticket that have said something before
        self._waiting = [0] * workers  # arrivals that are not applied or dropped yet
        self._refused: set[int] = set()  # arrived tickets whose gradient was left out
        self._last = [-1] * workers  # the version that each has computed on last
        self.finished: dict[int, float] = {}  # workers that will bring nothing more -> when they said so

    # ------------------------------------------------------------ from the coordinator

    def start(self, ticket: Ticket) -> None:
        self._flying[ticket.worker] = ticket
        self._cancelled[ticket.worker].pop(ticket.version, None)  # it was rebound
        if self._said[ticket.worker]:
            self._ready[ticket.worker] = None

    def cancel(self, ticket: Ticket, time: float) -> None:
        if self._flying.get(ticket.worker) is ticket:
            del self._flying[ticket.worker]
            self._cancelled[ticket.worker][ticket.version] = ticket, time
        else:  # it has arrived, which the coordinator has not heard of and will not mind
            self._waiting[ticket.worker] -= 1

    def end(self, ticket: Ticket) -> bool:
        """An arrival is applied or dropped; gives whether its gradient was left out because it held NaN or Inf."""
        self._waiting[ticket.worker] -= 1
        if ticket.id in self._refused:
            self._refused.remove(ticket.id)
            return True
        return False

    def leave(self, time: float, beyond: int | None = None) -> list[Event]:
        """Those that have finished are gone, as far as their last ticket was one too many.

        Without such a ticket they have done their part of the round that is open, or had no batch for it; the policy
        closes it only while it knows of them.

        beyond: only where somebody has computed on this version, and they have not.
        """
        gone = [worker for worker in self.finished if worker in self._flying]
        if beyond is not None:
            gone = [worker for worker in gone if self._last[worker] < beyond]
        for worker in gone:
            del self.finished[worker]
        return [WorkerLost(time, worker, (self._flying.pop(worker).id,)) for worker in gone]

    def late(self, event: Rebound) -> Event:
        """No ticket can be rebound to a version that is over: its worker is late, and the policy drops the ticket."""
        ticket = event.ticket
        return self._brought(ticket.worker, None, event.time) if self._flying.get(ticket.worker) is ticket else event

    @property
    def somebody_computes(self) -> bool:
        return bool(self._flying)

    def waiting_among(self, workers: Iterable[int]) -> int:
        """How many of these workers have brought something that is not used yet."""
        return sum(self._has_brought(worker) for worker in workers)

    def waiting_besides(self, workers: Iterable[int]) -> int:
        """How many of all but these workers have."""
        besides = set(range(len(self._waiting))).difference(workers)
        return self.waiting_among(besides)

    def _has_brought(self, worker: int) -> bool:
        return self._waiting[worker] > 0 or any(said.message["kind"] == "arrived" for said in self._said[worker])

    # ------------------------------------------------------------ from the processes

    def said(self, time: float, worker: int, message: Message) -> Iterator[Event]:
        """What follows from a process's words, if its ticket is there; otherwise they are kept."""
        self._said[worker].append(_Said(time, message))
        if message["kind"] == "arrived":
            self._last[worker] = message["version"]
        yield from self._go_through(worker, time)

    def ready_events(self, time: float) -> list[Event]:
        """What follows from words that were kept, of workers that were started since."""
        events: list[Event] = []
        while self._ready:
            worker = next(iter(self._ready))
            del self._ready[worker]
            events += self._go_through(worker, time)
        return events

    def _go_through(self, worker: int, time: float) -> Iterator[Event]:
        said = self._said[worker]
        while said:
            heard = said[0]
            kind = heard.message["kind"]
            if kind == "finished":
                said.clear()
                self.finished[worker] = heard.time
            elif kind == "began":
                said.popleft()
                if self._began is not None and self._began(worker, heard.message["version"]):
                    yield from self._rebound(worker, time)
            elif self._in_order:
                if worker not in self._flying:
                    return
                said.popleft()
                yield self._brought(worker, heard, refused_later=kind == "refused")
            else:
                taken, events = self._judge(worker, heard)
                if taken:
                    said.popleft()
                yield from events
                if not taken:
                    return

    def _judge(self, worker: int, heard: _Said) -> tuple[bool, list[Event]]:
        """Whether these words are done with, and what follows from them."""
        time, message = heard
        kind, version = message["kind"], message["version"]
        flying, past = self._flying.get(worker), self._cancelled[worker].get(version)
        if past is None and flying is None and version >= self.version:
            return False, []  # its ticket is yet to be started
        if past is None and flying is not None and version > flying.version:
            # It went on from a newer version than was thought; what it was thought to compute will not come.
            return False, [self._brought(worker, None, time)]
        events: list[Event] = []
        rebound = self._done is not None and self._done(worker, version)
        if past is not None:
            ticket, cancelled_at = past
            for older in [one for one in self._cancelled[worker] if one <= version]:
                del self._cancelled[worker][older]
            events.append(Abandoned(time, ticket, max(0.0, time - cancelled_at)))
            if rebound:
                events += self._rebound(worker, time)
        elif flying is None:
            pass  # of a version that is over, and nobody waits for it
        elif version == flying.version and kind == "refused":
            del self._flying[worker]
            events.append(Refused(time, flying))
        elif version == flying.version and kind == "arrived":
            events.append(self._brought(worker, heard))
        elif flying.version < self.version:  # late and left to finish: the policy drops it
            events.append(self._brought(worker, None, time))
        else:  # it was given up, or computed on the version before, and its round is still open
            events += self._rebound(worker, time)
        return True, events

    def _brought(self, worker: int, heard: _Said | None, time: float = 0.0, refused_later: bool = False) -> Arrived:
        ticket = self._flying.pop(worker)
        self._waiting[worker] += 1
        if refused_later:
            self._refused.add(ticket.id)
        return Arrived(time, ticket) if heard is None else Arrived(heard.time, ticket, _parts(heard.message))

    def _rebound(self, worker: int, time: float) -> list[Event]:
        flying = self._flying.get(worker)
        return [] if flying is None else [Rebound(time, flying)]


def _parts(message: Message) -> Parts | None:
    """Where a process says that its time went."""
    if "compute_s" not in message:
        return None
    return Parts(message.get("data_s", 0.0), message["compute_s"], message.get("transfer_s", 0.0))
