"""The life of tickets on real workers: orders out, events in, in real time. Where workers are is not its business."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from quorate.engines.base import Job
from quorate.engines.processes import messages
from quorate.engines.processes.making import Arrival
from quorate.errors import BadInput
from quorate.events import Abandoned, Arrived, Event, Parts, Refused, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.faults import Faults
from quorate.latency import Latency


@dataclass
class Order:
    """A ticket that a worker was given and has not answered yet, with what it reads and where its gradient goes."""

    ticket: Ticket
    version: Any
    gradient: Any
    delay_s: float  # what it was told to wait before computing
    packet: bytes = b""
    cancelled: bool = False
    answer: messages.Answer = None  # what the worker said, while the gradient is on its way to other machines
    parts_left: int = 0  # of the gradient, that are on their way
    is_lost: bool = False  # one of them was lost on its way
    forgotten: bool = False  # the run has stepped back behind it: nobody is told of it any more
    serial: int = 0  # of the order, where ticket numbers come again because the run steps back


@dataclass
class Loss:
    """A worker is gone; these were its unanswered orders."""

    worker: int
    orders: list[Order]
    was_ready: bool


Happening = tuple[Order, messages.Answer] | Loss | int  # an answer; a loss; a worker that is ready


class Crew(Protocol):
    """Talks to workers."""

    def send(self, ticket: Ticket, version: Any, gradient: Any, next_batch: int, delay_s: float) -> None: ...

    def cancel(self, ticket: Ticket) -> Order | None:
        """Let a worker know that its ticket is over; gives the order back if the worker never got it."""

    def wait(self, timeout_s: float | None) -> list[Happening]:
        """What has happened, after waiting for something for at most so long."""

    def lose(self, worker: int) -> None:
        """Kill a worker, as a script of faults says."""


class Store(Protocol):
    """Room for versions and gradients."""

    def take(self, worker: int) -> Any:
        """Room for a gradient of this worker, held once."""

    def hold(self, version: Any) -> None: ...

    def release(self, what: Any) -> None: ...


class Updater(Protocol):
    """Keeps arrivals, and makes versions of them."""

    def version_block(self, version: int) -> Any: ...

    def arrived(self, arrival: Arrival) -> None: ...

    def drop(self, ticket: Ticket) -> None: ...

    def worth_folding_after(self) -> float | None:
        """How long nothing must happen before `fold` is worth calling; None: never."""

    def fold(self) -> None: ...


@dataclass
class _Lives:
    """How often a worker has begun, how often it has ended, and of how many lives the coordinator has been told."""

    begun: int = 0
    ended: int = 0
    told: int = 0

    def is_the_one_told_of(self) -> bool:
        """Whether the coordinator means the process that is there now. It may be some events behind."""
        return self.told == self.begun == self.ended + 1


@dataclass
class _Flight:
    ticket: Ticket
    started: float


class LiveRun:
    """One run with real workers, from its first event to its last."""

    def __init__(
        self,
        job: Job,
        workers: int,
        crew: Crew,
        store: Store,
        updater: Updater,
        *,
        latency: Latency | None,
        faults: Faults | None,
    ) -> None:
        self._crew, self._store, self._updater = crew, store, updater
        self._ledger = job.ledger
        self._timers: list[tuple[float, int]] = []
        self._events: deque[Event] = deque()
        self._flights: dict[int, _Flight] = {}
        self._lives = [_Lives() for _ in range(workers)]
        self._zero = monotonic()
        self._newest_time = 0.0
        self._last_happened = 0.0
        self._draw = None if latency is None else latency.sampler(job.seed, workers)
        self.steps = [0] * workers
        self._last_version = [-1] * workers
        self._repeats = [0] * workers
        synchronous = job.policy.staleness_bound == 0
        self._stride = job.policy.begin(workers).per_update if synchronous else workers
        self._newest_batch = -1
        self._faults = _fault_times(faults)

    def begin_time(self, ready: Iterable[int]) -> None:
        """Time begins, with these workers."""
        self._zero = monotonic()
        for worker in ready:
            self._lives[worker].begun = 1
            self._events.append(WorkerJoined(0.0, worker))

    def clock(self) -> float:
        return monotonic() - self._zero

    def tick(self) -> float:
        """The time, remembered as the newest that anybody was told."""
        self._newest_time = self.clock()
        return self._newest_time

    def set_clock(self, time: float) -> None:
        """Let it be `time` now."""
        self._zero = monotonic() - time
        self._faults = [(at, worker) for at, worker in self._faults if at > time]  # the others were before
        self._events = deque(event._replace(time=time) for event in self._events)

    def start_over(self, ready: Iterable[int], time: float) -> None:
        """The run goes on from a checkpoint, with these workers; nothing that was under way counts."""
        self._timers.clear()
        self._events.clear()
        self._flights.clear()
        self._lives = [_Lives() for _ in self._lives]
        self._last_version = [-1] * len(self._lives)
        self._newest_batch, self._newest_time, self._last_happened = -1, time, time
        self.begin_time(ready)
        self.set_clock(time)

    def set_timer(self, at: float, key: int) -> None:
        heapq.heappush(self._timers, (at, key))

    # ------------------------------------------------------------ tickets

    def begin(self, ticket: Ticket) -> None:
        number = ticket.worker
        if not self._lives[number].is_the_one_told_of():
            return  # it is lost, which one of the next events will say
        version, gradient = self._updater.version_block(ticket.version), self._store.take(number)
        self._store.hold(version)
        self._crew.send(ticket, version, gradient, self._likely_next(ticket), self._delay(ticket))
        self._flights[number] = _Flight(ticket, self.clock())

    def _delay(self, ticket: Ticket) -> float:
        """The injected latency, with the coordinates that the simulator gives it."""
        if self._draw is None:
            return 0.0
        number, version = ticket.worker, ticket.version
        step = self.steps[number]
        self.steps[number] = step + 1
        repeat = self._repeats[number] + 1 if self._last_version[number] == version else 0
        self._last_version[number], self._repeats[number] = version, repeat
        return self._draw(number, step, version + (repeat << 40), self.clock())

    def _likely_next(self, ticket: Ticket) -> int:
        """The batch this worker will probably get next: a version uses up so many fresh ones."""
        if ticket.batch <= self._newest_batch:
            return -1  # one that came back; who will get the next of those, nobody knows
        self._newest_batch = ticket.batch
        likely, ledger = ticket.batch + self._stride, self._ledger
        if ledger.epochs is not None and ledger.batches_per_epoch is not None:
            return likely if likely < ledger.epochs * ledger.batches_per_epoch else -1
        return likely

    def cancel(self, ticket: Ticket) -> None:
        if self._flights.pop(ticket.worker, None) is None:
            self._forget(ticket)
            return
        never_sent = self._crew.cancel(ticket)
        if never_sent is not None:
            self._give_back(never_sent)

    def _forget(self, ticket: Ticket) -> None:
        """It was finished, but nobody has heard of that yet, and nobody shall."""
        for event in self._events:
            if isinstance(event, Arrived | Refused) and event.ticket is ticket:
                self._events.remove(event)
                if isinstance(event, Arrived):
                    self._updater.drop(ticket)
                return

    def _give_back(self, order: Order) -> None:
        self._store.release(order.version)
        self._store.release(order.gradient)

    # ------------------------------------------------------------ events

    def next_event(self, until: float | None) -> Event | None:
        event = self._next_event(until)
        # What was noticed while a version was made has an earlier time; in the trace, time does not go back.
        return event if event is None or event.time >= self._newest_time else event._replace(time=self.tick())

    def _next_event(self, until: float | None) -> Event | None:
        while not self._events:
            now = self.clock()
            if self._timers and self._timers[0][0] <= now:
                return Timer(now, heapq.heappop(self._timers)[1])
            if until is not None and now >= until:
                return None
            while self._faults and self._faults[0][0] <= now:
                self._crew.lose(heapq.heappop(self._faults)[1])
            heads = (until, self._timers and self._timers[0][0], self._faults and self._faults[0][0])
            wake = [time for time in heads if time]
            timeout = min(wake) - now if wake else None
            silence_s = self._updater.worth_folding_after()
            if silence_s is not None:
                if now - self._last_happened >= silence_s:
                    self._updater.fold()
                    continue
                left_s = self._last_happened + silence_s - now
                timeout = left_s if timeout is None else min(timeout, left_s)
            self._take_in(self._crew.wait(timeout))
        event = self._events.popleft()
        if isinstance(event, WorkerJoined):
            self._lives[event.worker].told += 1
        return event

    def _take_in(self, happenings: list[Happening]) -> None:
        """Make events of what happened."""
        for happening in happenings:
            now = self._last_happened = self.clock()
            if isinstance(happening, int):
                self._lives[happening].begun += 1
                self._events.append(WorkerJoined(now, happening))
            elif isinstance(happening, Loss):
                self._lose(now, happening)
            else:
                self._answered(now, *happening)

    def _lose(self, now: float, loss: Loss) -> None:
        for order in loss.orders:
            self._give_back(order)
        flight = self._flights.pop(loss.worker, None)
        if loss.was_ready:
            self._lives[loss.worker].ended += 1
            self._last_version[loss.worker] = -1
            self._events.append(WorkerLost(now, loss.worker, () if flight is None else (flight.ticket.id,)))

    def _answered(self, now: float, order: Order, answer: messages.Answer) -> None:
        ticket = order.ticket
        if isinstance(answer, messages.Abandoned):
            self._give_back(order)
            if not order.forgotten:
                self._events.append(Abandoned(now, ticket, answer.cancel_s))
            return
        if order.cancelled:  # it was finished before the worker noticed
            self._give_back(order)
            return
        flight = self._flights.pop(ticket.worker)
        if isinstance(answer, messages.Refused):
            self._give_back(order)
            self._events.append(Refused(now, ticket))
            return
        assert isinstance(answer, messages.Done)
        self._updater.arrived(Arrival(ticket, order.version, order.gradient, answer.loss, answer.some_missing))
        transfer_s = max(0.0, now - flight.started - answer.data_s - answer.compute_s)
        self._events.append(Arrived(now, ticket, Parts(answer.data_s, answer.compute_s, transfer_s)))


def check_faults(engine: str, faults: Faults | None, workers: int) -> None:
    """Refuse what cannot be done to real workers."""
    if faults is None:
        return
    if faults.crash_every_s is not None:
        raise BadInput(f"the {engine} engine kills by a script (lose:3@10); crash: is for the simulated engine")
    for fault in faults.script:
        if fault.worker >= workers:
            raise BadInput(f"faults name worker {fault.worker}, but there are {workers}, counted from 0")


def _fault_times(faults: Faults | None) -> list[tuple[float, int]]:
    """When to kill whom, as a heap. Workers come back by themselves, so a return in the script says nothing new."""
    if faults is None:
        return []
    return sorted((fault.time, fault.worker) for fault in faults.script if fault.kind == "lose")
