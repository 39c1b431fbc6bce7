"""Real worker processes on this machine, with parameters and gradients in memory that all of them share."""

from __future__ import annotations

import heapq
import os
import sys
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from quorate.engines._in_process import checked_device
from quorate.engines._kept import HALF, Kept, finds_nan_early
from quorate.engines.base import Engine, Job, Outcome
from quorate.engines.local import messages, worker
from quorate.engines.local.crew import Crew, Loss, Order
from quorate.engines.local.memory import BlockLayout, Blocks, Control, anonymous_file, available_bytes, gigabytes
from quorate.engines.local.pool import Pool
from quorate.engines.local.sending import write_job
from quorate.engines.local.store import Store
from quorate.engines.local.updating import Arrival, Updater
from quorate.errors import BadInput, check_at_least
from quorate.events import Abandoned, Arrived, Event, Parts, Refused, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.faults import Faults, parse_faults
from quorate.latency import Latency, parse_latency
from quorate.learner import Learner

#: What a worker process takes beside its blocks and the task's own data: a fork of the template, measured 9 to 15 MB.
WORKER_BYTES = 20_000_000
WIRES = ("fp32", "bf16")


class Local(Engine):
    """Worker processes on this machine.

    workers: how many.
    threads: threads inside torch, in each worker.
    device: where workers compute: "cpu", "cuda" (all GPUs in turn), or one such as "cuda:0" for all.
    latency: an artificial delay before each ticket, as a model or its text form; drawn as the simulator draws it.
    faults: when workers are killed, as a script or its text form; killed for real. They come back by themselves.
    wire: how gradients are stored on their way: "fp32" as they are, or "bf16", half the bytes.
    """

    name = "local"
    keeps_checkpoints = True

    def __init__(
        self,
        workers: int,
        *,
        threads: int = 1,
        device: str = "cpu",
        latency: Latency | str | None = None,
        faults: Faults | str | None = None,
        wire: str = "fp32",
    ) -> None:
        self.workers = check_at_least("workers", workers, 1)
        self.threads = check_at_least("threads", threads, 1)
        self.device = checked_device(device)
        self.latency = parse_latency(latency) if isinstance(latency, str) else latency
        self.faults = parse_faults(faults) if isinstance(faults, str) else faults
        _check_faults(self.faults, workers)
        if wire not in WIRES:
            raise BadInput(f"wire is {wire!r}, but gradients can be stored as one of: {', '.join(WIRES)}")
        self.wire = wire
        self._open: _Open | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "threads": self.threads,
            "device": str(self.device),
            "latency": None if self.latency is None else self.latency.text(),
            "faults": None if self.faults is None else self.faults.source,
            "wire": self.wire,
            "arithmetic": Kept.arithmetic if self.wire == "fp32" else HALF,
        }

    # ------------------------------------------------------------ opening and closing

    def open(self, job: Job) -> None:
        if not sys.platform.startswith("linux"):
            raise BadInput("the local engine needs Linux (memfd, epoll); elsewhere use the simulated engine")
        if worker.in_worker_process:
            raise BadInput(
                "the script starts a run when a worker process imports it; "
                'put what starts the run under: if __name__ == "__main__":'
            )
        if job.task is None:
            raise BadInput("the local engine needs a task to compute gradients of; use the simulated engine")
        if self.wire != "fp32" and job.learning.delay_compensation:
            raise BadInput("delay compensation multiplies small differences, which a 16-bit wire rounds away; use fp32")
        self._saved_random_state = torch.get_rng_state()
        with ExitStack() as to_close:
            self._open = _Open(self, job, to_close)
            self._open.start()
            self._open.to_close = to_close.pop_all()

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.to_close.close()
            torch.set_rng_state(self._saved_random_state)

    @property
    def _run(self) -> _Open:
        assert self._open is not None, "the engine is not open"
        return self._open

    # ------------------------------------------------------------ tickets and time

    def start(self, ticket: Ticket) -> None:
        self._run.begin(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._run.cancel(ticket)

    def drop(self, ticket: Ticket) -> None:
        self._run.updater.drop(ticket)

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        began = monotonic()
        outcome = self._run.updater.apply(tickets, weights)
        return outcome._replace(apply_s=monotonic() - began)

    def now(self, time: float) -> float:
        return self._run.tick()

    def set_timer(self, at: float, key: int) -> None:
        heapq.heappush(self._run.timers, (at, key))

    def next_event(self, until: float | None) -> Event | None:
        event = self._run.next_event(until)
        # What was noticed while a version was made has an earlier time; in the trace, time does not go back.
        return event if event is None or event.time >= self._run.newest_time else event._replace(time=self._run.tick())

    # ------------------------------------------------------------ the model

    def evaluate(self) -> dict[str, float]:
        return self._run.updater.evaluate()

    def parameters(self) -> dict[str, Tensor]:
        return self._run.learner.state_dict()

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        return self._run.learner.average_dict()

    def parameter_bytes(self) -> int:
        return self._run.learner.nbytes

    def state(self) -> dict[str, Any]:
        return {**self._run.updater.state(), "steps": list(self._run.steps)}

    def restore(self, state: dict[str, Any], time: float) -> None:
        self._run.updater.restore(state)
        self._run.steps[:] = state["steps"]
        self._run.set_clock(time)

    def processes(self) -> dict[int, int]:
        """The process number of each worker that has one; for tests and for the curious."""
        return self._run.crew.pids()


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


class _Open:
    """One run of the engine, from open to close."""

    def __init__(self, engine: Local, job: Job, to_close: ExitStack) -> None:
        assert job.task is not None
        self._engine, self._job = engine, job
        self.to_close = ExitStack()  # once open: what to give back at the end, last first
        blocks, words, description = (_anonymous(name, to_close) for name in ("blocks", "control", "job"))
        self.learner = Learner(job.task, job.learning, job.seed, torch.device("cpu"))
        layout = BlockLayout(self.learner.model, engine.wire)
        self._check_room(layout.nbytes)
        os.ftruncate(words, Control.size(engine.workers))
        # The template imports torch while we go on; workers are forked once the job is written.
        pool = Pool(blocks, words, description)
        to_close.callback(pool.close)
        control = Control(words, engine.workers)
        to_close.callback(control.close)
        self.crew = Crew(engine.workers, pool, control)
        to_close.callback(self.crew.close)
        self._store = Store(layout, Blocks(blocks, layout.nbytes))
        to_close.callback(self._store.close)
        self.updater = Updater(job, self.learner, layout, self._store, engine.workers, engine.threads)
        to_close.callback(self.updater.close)
        write_job(description, job.task, self._describe_job(layout))
        self.timers: list[tuple[float, int]] = []
        self._events: deque[Event] = deque()
        self._flights: dict[int, _Flight] = {}
        self._lives = [_Lives() for _ in range(engine.workers)]
        self._zero = monotonic()
        self.newest_time = 0.0
        self._last_happened = 0.0
        self._draw = None if engine.latency is None else engine.latency.sampler(job.seed, engine.workers)
        self.steps = [0] * engine.workers
        self._last_version = [-1] * engine.workers
        self._repeats = [0] * engine.workers
        synchronous = job.policy.staleness_bound == 0
        self._stride = job.policy.begin(engine.workers).per_update if synchronous else engine.workers
        self._newest_batch = -1
        self._faults = _fault_times(engine)

    def _check_room(self, block_bytes: int) -> None:
        """Refuse what cannot fit before anything is started."""
        workers, policy = self._engine.workers, self._job.policy
        # Under a synchronous policy two versions are alive; else every worker may hold one of its own.
        fixed, held = (2, 0) if policy.staleness_bound == 0 else (1 + policy.history, 1)
        versions = fixed + held * workers
        each = (1 + held) * block_bytes + WORKER_BYTES
        needed = fixed * block_bytes + workers * each
        free = available_bytes()
        if free is not None and needed > free:
            fits = max(0, (free - fixed * block_bytes) // each)
            raise BadInput(
                f"{workers} workers need about {gigabytes(needed)} of memory (each a gradient of "
                f"{gigabytes(block_bytes)} and {gigabytes(WORKER_BYTES)} for its process; {versions} versions of the "
                f"parameters), but only {gigabytes(free)} are free; take at most {fits}"
            )

    def _describe_job(self, layout: BlockLayout) -> dict[str, Any]:
        engine, job = self._engine, self._job
        assert job.task is not None
        return {
            "workers": engine.workers,
            "threads": engine.threads,
            "devices": _devices(engine.device),
            "wire": engine.wire,
            "block_bytes": layout.nbytes,
            "batch_size": job.ledger.batch_size,
            "samples": job.ledger.samples,
            "seed": job.seed,
            "look_through": finds_nan_early(job.policy),
        }

    def start(self) -> None:
        """Wait until every worker is there; time begins then."""
        for number in range(self._engine.workers):
            self.crew.start(number)
        ready: set[int] = set()
        while len(ready) < self._engine.workers:
            if self._job.stop is not None and self._job.stop.reason is not None:
                raise KeyboardInterrupt
            for happening in self.crew.wait(None):
                if isinstance(happening, int):
                    ready.add(happening)
                elif isinstance(happening, Loss):
                    ready.discard(happening.worker)
        self._zero = monotonic()
        for lives in self._lives:
            lives.begun = 1
        self._events.extend(WorkerJoined(0.0, number) for number in range(self._engine.workers))

    def clock(self) -> float:
        return monotonic() - self._zero

    def tick(self) -> float:
        """The time, remembered as the newest that anybody was told."""
        self.newest_time = self.clock()
        return self.newest_time

    def set_clock(self, time: float) -> None:
        """Let it be `time` now."""
        self._zero = monotonic() - time
        self._faults = [(at, worker) for at, worker in self._faults if at > time]  # the others were before
        self._events = deque(event._replace(time=time) for event in self._events)

    # ------------------------------------------------------------ tickets

    def begin(self, ticket: Ticket) -> None:
        number = ticket.worker
        if not self._lives[number].is_the_one_told_of():
            return  # it is lost, which one of the next events will say
        version, gradient = self.updater.version_block(ticket.version), self._store.take(number)
        self._store.hold(version)
        self.crew.send(ticket, version, gradient, self._likely_next(ticket), self._delay(ticket))
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
        likely, ledger = ticket.batch + self._stride, self._job.ledger
        if ledger.epochs is not None and ledger.batches_per_epoch is not None:
            return likely if likely < ledger.epochs * ledger.batches_per_epoch else -1
        return likely

    def cancel(self, ticket: Ticket) -> None:
        if self._flights.pop(ticket.worker, None) is None:
            self._forget(ticket)
            return
        never_sent = self.crew.cancel(ticket)
        if never_sent is not None:
            self._give_back(never_sent)

    def _forget(self, ticket: Ticket) -> None:
        """It was finished, but nobody has heard of that yet, and nobody shall."""
        for event in self._events:
            if isinstance(event, Arrived | Refused) and event.ticket is ticket:
                self._events.remove(event)
                if isinstance(event, Arrived):
                    self.updater.drop(ticket)
                return

    def _give_back(self, order: Order) -> None:
        self._store.release(order.version)
        self._store.release(order.gradient)

    # ------------------------------------------------------------ events

    def next_event(self, until: float | None) -> Event | None:
        while not self._events:
            now = self.clock()
            if self.timers and self.timers[0][0] <= now:
                return Timer(now, heapq.heappop(self.timers)[1])
            if until is not None and now >= until:
                return None
            while self._faults and self._faults[0][0] <= now:
                self.crew.lose(heapq.heappop(self._faults)[1])
            wake = [
                time for time in (until, self.timers and self.timers[0][0], self._faults and self._faults[0][0]) if time
            ]
            timeout = min(wake) - now if wake else None
            silence_s = self.updater.worth_folding_after()
            if silence_s is not None:
                if now - self._last_happened >= silence_s:
                    self.updater.fold()
                    continue
                left_s = self._last_happened + silence_s - now
                timeout = left_s if timeout is None else min(timeout, left_s)
            self._take_in(self.crew.wait(timeout))
        event = self._events.popleft()
        if isinstance(event, WorkerJoined):
            self._lives[event.worker].told += 1
        return event

    def _take_in(self, happenings: list[Any]) -> None:
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
        self.updater.arrived(Arrival(ticket, order.version, order.gradient, answer.loss, answer.some_missing))
        transfer_s = max(0.0, now - flight.started - answer.data_s - answer.compute_s)
        self._events.append(Arrived(now, ticket, Parts(answer.data_s, answer.compute_s, transfer_s)))


def _anonymous(name: str, to_close: ExitStack) -> int:
    descriptor = anonymous_file(f"quorate-{name}")
    to_close.callback(os.close, descriptor)
    return descriptor


def _devices(device: torch.device) -> list[str]:
    """Where workers compute, in turn."""
    if device.type == "cuda" and device.index is None:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)]


def _check_faults(faults: Faults | None, workers: int) -> None:
    if faults is None:
        return
    if faults.crash_every_s is not None:
        raise BadInput("the local engine kills by a script (lose:3@10); crash: is for the simulated engine")
    for fault in faults.script:
        if fault.worker >= workers:
            raise BadInput(f"faults name worker {fault.worker}, but there are {workers}, counted from 0")


def _fault_times(engine: Local) -> list[tuple[float, int]]:
    """When to kill whom, as a heap. Workers come back by themselves, so a return in the script says nothing new."""
    if engine.faults is None:
        return []
    return sorted((fault.time, fault.worker) for fault in engine.faults.script if fault.kind == "lose")
