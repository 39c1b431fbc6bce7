"""Tickets on real workers, in real time: orders go out to workers, their answers become events."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from quorate.engines.base import Engine, Job, Outcome
from quorate.engines.shared import messages
from quorate.engines.shared.order_book import Loss, Order
from quorate.engines.shared.update import Arrival
from quorate.errors import BadInput
from quorate.events import Abandoned, Arrived, Event, Parts, Refused, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.faults import Faults
from quorate.latency import Latency

Happening = tuple[Order, messages.Answer] | Loss | int  # an answered order, a lost worker, or a worker that is ready


class Workers(Protocol):
    """The workers of a run, as the main process sees them."""

    def send(self, ticket: Ticket, version: Any, gradient: Any, next_batch: int, delay_s: float) -> None: ...

    def cancel(self, ticket: Ticket) -> Order | None:
        """Tell a worker that its ticket is cancelled; returns the order if it was never sent."""

    def wait(self, timeout_s: float | None) -> list[Happening]:
        """Wait until something happens, for at most `timeout_s`, and return what happened."""

    def lose(self, worker: int) -> None:
        """Kill a worker, as a fault script asks."""


class Store(Protocol):
    """Memory for versions and gradients, with reference counts."""

    def take(self, worker: int) -> Any:
        """Memory for a gradient of this worker, with a count of one."""

    def hold(self, version: Any) -> None: ...

    def release(self, what: Any) -> None: ...


class Versions(Protocol):
    """Keeps arrivals, and makes versions from them."""

    def version_block(self, version: int) -> Any: ...

    def arrived(self, arrival: Arrival) -> None: ...

    def drop(self, ticket: Ticket) -> None: ...

    def worth_folding_after(self) -> float | None:
        """Seconds without an event after which `fold` should be called; None: never."""

    def fold(self) -> None:
        """Add the gradients that have arrived to the sum, before the quorum is complete."""


@dataclass
class _Lives:
    """Counts the processes of one worker: started, ended, and reported to the coordinator as joined."""

    begun: int = 0
    ended: int = 0
    reported: int = 0

    def is_current(self) -> bool:
        """Whether the coordinator means the running process. It may be some events behind."""
        return self.reported == self.begun == self.ended + 1


class LiveRun:
    """One run with real workers, from its first event to its last."""

    def __init__(
        self,
        job: Job,
        count: int,
        workers: Workers,
        store: Store,
        versions: Versions,
        *,
        latency: Latency | None,
        faults: Faults | None,
    ) -> None:
        self._workers, self._store, self._versions = workers, store, versions
        self._ledger = job.ledger
        self._timers: list[tuple[float, int]] = []
        self._events: deque[Event] = deque()
        self._flights: dict[int, tuple[Ticket, float]] = {}  # by worker: its ticket and when it was sent
        self._lives = [_Lives() for _ in range(count)]
        self._zero = monotonic()
        self._newest_time = 0.0
        self._last_happened = 0.0
        self._draw = None if latency is None else latency.sampler(job.seed, count)
        self.steps = [0] * count  # injected latencies drawn so far, by worker
        self._last_version = [-1] * count
        self._repeats = [0] * count  # tickets in a row that each worker has started on the same version
        synchronous = job.policy.staleness_bound == 0
        self._stride = job.policy.begin(count).per_update if synchronous else count
        self._newest_batch = -1
        # (time, worker) of each kill, as a heap. Lost workers are restarted anyway, so scripted returns are ignored.
        script = () if faults is None else faults.script
        self._faults = sorted((fault.time, fault.worker) for fault in script if fault.kind == "lose")

    def begin_time(self, ready: Iterable[int]) -> None:
        """Set the clock to zero; these workers have joined."""
        self._zero = monotonic()
        for worker in ready:
            self._lives[worker].begun = 1
            self._events.append(WorkerJoined(0.0, worker))

    def clock(self) -> float:
        return monotonic() - self._zero

    def tick(self) -> float:
        """The time, which no later event may precede."""
        self._newest_time = self.clock()
        return self._newest_time

    def set_clock(self, time: float) -> None:
        """Set the clock, and drop the faults before this time."""
        self._zero = monotonic() - time
        self._faults = [(at, worker) for at, worker in self._faults if at > time]
        self._events = deque(event._replace(time=time) for event in self._events)

    def start_over(self, ready: Iterable[int], time: float) -> None:
        """Continue from a checkpoint with these workers; forget all tickets, events and timers."""
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
        if not self._lives[number].is_current():
            return  # the worker is lost, and its WorkerLost event is queued
        version, gradient = self._versions.version_block(ticket.version), self._store.take(number)
        self._store.hold(version)
        self._workers.send(ticket, version, gradient, self._likely_next(ticket), self._delay(ticket))
        self._flights[number] = ticket, self.clock()

    def _delay(self, ticket: Ticket) -> float:
        """The injected latency, drawn with the same coordinates as in the simulator."""
        if self._draw is None:
            return 0.0
        number, version = ticket.worker, ticket.version
        step = self.steps[number]
        self.steps[number] = step + 1
        repeat = self._repeats[number] + 1 if self._last_version[number] == version else 0
        self._last_version[number], self._repeats[number] = version, repeat
        return self._draw(number, step, version + (repeat << 40), self.clock())

    def _likely_next(self, ticket: Ticket) -> int:
        """The batch that this worker will probably get next: a version uses up `_stride` fresh batches."""
        if ticket.batch <= self._newest_batch:
            return -1  # a batch that was given back; the next one cannot be predicted
        self._newest_batch = ticket.batch
        likely, ledger = ticket.batch + self._stride, self._ledger
        if ledger.epochs is not None and ledger.batches_per_epoch is not None:
            return likely if likely < ledger.epochs * ledger.batches_per_epoch else -1
        return likely

    def cancel(self, ticket: Ticket) -> None:
        if self._flights.pop(ticket.worker, None) is None:
            self._forget(ticket)
            return
        never_sent = self._workers.cancel(ticket)
        if never_sent is not None:
            self._give_back(never_sent)

    def _forget(self, ticket: Ticket) -> None:
        """Remove the queued event of a ticket that was finished before it was cancelled."""
        for event in self._events:
            if isinstance(event, Arrived | Refused) and event.ticket is ticket:
                self._events.remove(event)
                if isinstance(event, Arrived):
                    self._versions.drop(ticket)
                return

    def _give_back(self, order: Order) -> None:
        self._store.release(order.version)
        self._store.release(order.gradient)

    # ------------------------------------------------------------ events

    def next_event(self, until: float | None) -> Event | None:
        event = self._next_event(until)
        # An event that happened while a version was made has an earlier time; in the trace, time does not go back.
        return event if event is None or event.time >= self._newest_time else event._replace(time=self.tick())

    def _next_event(self, until: float | None) -> Event | None:
        while not self._events:
            now = self.clock()
            if self._timers and self._timers[0][0] <= now:
                return Timer(now, heapq.heappop(self._timers)[1])
            if until is not None and now >= until:
                return None
            while self._faults and self._faults[0][0] <= now:
                self._workers.lose(heapq.heappop(self._faults)[1])
            heads = (until, self._timers and self._timers[0][0], self._faults and self._faults[0][0])
            wake = [time for time in heads if time]
            timeout = min(wake) - now if wake else None
            silence_s = self._versions.worth_folding_after()
            if silence_s is not None:
                if now - self._last_happened >= silence_s:
                    self._versions.fold()
                    continue
                left_s = self._last_happened + silence_s - now
                timeout = left_s if timeout is None else min(timeout, left_s)
            self._take_in(self._workers.wait(timeout))
        event = self._events.popleft()
        if isinstance(event, WorkerJoined):
            self._lives[event.worker].reported += 1
        return event

    def _take_in(self, happenings: list[Happening]) -> None:
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
            self._events.append(WorkerLost(now, loss.worker, () if flight is None else (flight[0].id,)))

    def _answered(self, now: float, order: Order, answer: messages.Answer) -> None:
        ticket = order.ticket
        if isinstance(answer, messages.AbandonedAnswer):
            self._give_back(order)
            if not order.forgotten:
                self._events.append(Abandoned(now, ticket, answer.cancel_s))
            return
        if order.cancelled:  # the worker had finished before it noticed
            self._give_back(order)
            return
        _, started = self._flights.pop(ticket.worker)
        if isinstance(answer, messages.RefusedAnswer):
            self._give_back(order)
            self._events.append(Refused(now, ticket))
            return
        assert isinstance(answer, messages.DoneAnswer)
        self._versions.arrived(Arrival(ticket, order.version, order.gradient, answer.loss, answer.some_missing))
        transfer_s = max(0.0, now - started - answer.data_s - answer.compute_s)
        self._events.append(Arrived(now, ticket, Parts(answer.data_s, answer.compute_s, transfer_s)))


def check_faults(engine: str, faults: Faults | None, workers: int) -> None:
    """Refuse faults that real workers cannot have."""
    if faults is None:
        return
    if faults.crash_every_s is not None:
        raise BadInput(f"the {engine} engine kills by a script (lose:3@10); crash: is for the simulated engine")
    for fault in faults.script:
        if fault.worker >= workers:
            raise BadInput(f"faults name worker {fault.worker}, but there are {workers}, counted from 0")


class LiveEngine(Engine):
    """Base of engines with real workers.

    An open run (`_open`) has a `live` (LiveRun), an `updater` (Versions) and `to_close`, which frees its resources.
    """

    wire: str
    _open: Any = None

    @property
    def _run(self) -> Any:
        assert self._open is not None, "the engine is not open"
        return self._open

    def _check_job(self, job: Job) -> None:
        if job.task is None:
            raise BadInput(f"the {self.name} engine needs a task to compute gradients of; use the simulated engine")
        if self.wire != "fp32" and job.learning.delay_compensation:
            raise BadInput("delay compensation multiplies small differences, which a 16-bit wire rounds away; use fp32")

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.to_close.close()

    def start(self, ticket: Ticket) -> None:
        self._run.live.begin(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._run.live.cancel(ticket)

    def drop(self, ticket: Ticket) -> None:
        self._run.updater.drop(ticket)

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None, reason: str) -> Outcome:
        began = monotonic()
        outcome: Outcome = self._run.updater.apply(tickets, weights)
        return outcome._replace(apply_s=monotonic() - began)

    def now(self, time: float) -> float:
        now: float = self._run.live.tick()
        return now

    def set_timer(self, at: float, key: int) -> None:
        self._run.live.set_timer(at, key)

    def next_event(self, until: float | None) -> Event | None:
        event: Event | None = self._run.live.next_event(until)
        return event
