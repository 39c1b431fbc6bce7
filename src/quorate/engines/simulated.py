"""A cluster that exists only in virtual time: equal seeds, equal runs, with real gradients or none."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

import torch

from quorate.engines._in_process import InProcessEngine
from quorate.engines.base import Job
from quorate.errors import BadInput, check_at_least
from quorate.events import Arrived, Event, Parts, Refused, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.faults import Fault, Faults, parse_faults
from quorate.latency import Latency, parse_latency
from quorate.network import Network, parse_network

# What happens first among things that happen at the same time. A worker that dies as it finishes is lost.
_FAULT, _ARRIVAL, _UPLOAD, _TIMER = 0, 1, 2, 3
_NO_TICKET = (_FAULT, _TIMER)
_CLEAR_UP_AT_LEAST = 1024


class Simulated(InProcessEngine):
    """Workers whose times come from a latency model; the clock jumps from event to event.

    workers: how many there are at the start.
    latency: seconds a ticket takes, as a model or its text form, e.g. "shifted-exp:0.05,0.025".
    network: communication on top, as a model or its text form; None: free.
    faults: when workers leave and come back, as a script or its text form.
    device: where gradients are computed, e.g. "cpu" or "cuda".
    together: compute a synchronous round as one big batch, and the gradients of asynchronous workers side by side,
        each at its own version (None: on a GPU yes, on a CPU no). On a CPU the latter halves the cost of tiny nets and
        doubles that of large ones.
    graphs: on a GPU, record the calls of gradients as CUDA graphs.
        Both are tried out first; switch them off for a loss that depends on something in Python (a counter, `random`)
        that a try does not show.
    model_bytes: size of a version and of a gradient, where no gradients are computed.
    """

    name = "simulated"

    def __init__(
        self,
        workers: int,
        latency: Latency | str = "constant:1",
        *,
        network: Network | str | None = None,
        faults: Faults | str | None = None,
        device: str | torch.device = "cpu",
        together: bool | None = None,
        graphs: bool = True,
        model_bytes: int | None = None,
    ) -> None:
        check_at_least("workers", workers, 1)
        super().__init__(device, model_bytes)
        self.workers = workers
        self.latency = parse_latency(latency) if isinstance(latency, str) else latency
        self.network = parse_network(network) if isinstance(network, str) else network
        self.faults = parse_faults(faults) if isinstance(faults, str) else faults
        self.together, self.graphs = together, graphs

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "latency": self.latency.text(),
            "network": None if self.network is None else self.network.text(),
            "faults": None if self.faults is None else self.faults.source,
            "device": str(self.device),
            "arithmetic": self.arithmetic,
            "graphs": self.graphs,
        }

    def open(self, job: Job) -> None:
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._now = 0.0
        script = () if self.faults is None else self.faults.script
        seats = max([self.workers, *(fault.worker + 1 for fault in script)])  # some may come later
        self._draw = self.latency.sampler(job.seed, seats)
        self._live: dict[int, None] = {}
        self._void: set[int] = set()  # tickets in the heap that were cancelled or lost
        # By worker, in lists because there may be ten thousand: tickets so far; version of the last, how often.
        self._steps = [0] * seats
        self._last_version = [-1] * seats
        self._repeats = [0] * seats
        self._times: dict[int, tuple[float, float]] = {}  # ticket -> when started, seconds of computing
        self._out_free_at = self._in_free_at = 0.0  # when a server's link has served what it has
        self._crashes: dict[Fault, Iterator[Fault]] = {}  # next random fault of a worker -> those after it
        self._open_model(job, self.together)
        if self.network is not None and not self.parameter_bytes():
            raise BadInput("a network is given, but not what goes over it; give model_bytes (--model-bytes)")
        network = self.network or Network()
        size = self.parameter_bytes()
        self._server_s, self._worker_s, self._link_s = network.server_s(size), network.worker_s(size), network.latency_s
        for worker in range(self.workers):
            self._push(0.0, _FAULT, Fault(0.0, worker, "join"))
        if self.faults is not None:
            for fault in script:
                self._push(fault.time, _FAULT, fault)
            for worker in range(self.workers):
                self._push_next_crash(self.faults.crashes(job.seed, worker))

    # ------------------------------------------------------------ tickets

    def start(self, ticket: Ticket) -> None:
        worker, version, now = ticket.worker, ticket.version, self._now
        steps = self._steps
        step = steps[worker]
        steps[worker] = step + 1
        # All first tickets of a version are one row; a second one of the same worker is in the next row.
        row, repeat = version, 0
        if self._last_version[worker] == version:
            repeat = self._repeats[worker] + 1
            row += repeat << 40
        self._last_version[worker] = version
        self._repeats[worker] = repeat
        seconds = self._draw(worker, step, row, now)
        if self._strategy is not None:
            self._strategy.started(ticket)
        if self.network is None:
            heappush(self._heap, (now + seconds, _ARRIVAL, ticket.id, ticket))
            return
        ready = now if repeat else self._transfer_out(now)  # the version may be there already
        self._times[ticket.id] = (now, seconds)
        heappush(self._heap, (ready + seconds, _UPLOAD, ticket.id, ticket))

    def cancel(self, ticket: Ticket) -> None:
        self._times.pop(ticket.id, None)
        if self._strategy is not None:
            self._strategy.ended(ticket, arrived=False)
        self._void.add(ticket.id)
        # Its entry stays in the heap until its time comes. Under heavy tails that may be never: clear up.
        if len(self._void) > _CLEAR_UP_AT_LEAST and 2 * len(self._void) > len(self._heap):
            void = self._void
            self._heap[:] = [entry for entry in self._heap if entry[1] in _NO_TICKET or entry[2] not in void]
            heapify(self._heap)
            void.clear()

    def set_timer(self, at: float, key: int) -> None:
        self._push(max(at, self._now), _TIMER, key)

    def next_event(self, until: float | None) -> Event | None:
        heap, void = self._heap, self._void
        while heap:
            if until is not None and heap[0][0] > until:
                self._now = until
                return None
            time, kind, number, what = heappop(heap)
            if kind in _NO_TICKET:
                pass
            elif number in void:
                void.remove(number)
                continue
            elif kind == _UPLOAD:
                heappush(heap, (self._transfer_in(time), _ARRIVAL, number, what))
                continue
            else:
                self._now = time
                if self._strategy is not None and not self._strategy.arrived(what):
                    return Refused(time, what)
                return Arrived(time, what, self._parts(time, what) if self.network is not None else None)
            self._now = time
            if kind == _TIMER:
                return Timer(time, what)
            event = self._befall(what)
            if event is not None:
                return event
        return None

    # ------------------------------------------------------------ faults

    def _befall(self, fault: Fault) -> Event | None:
        worker = fault.worker
        if fault in self._crashes:
            self._push_next_crash(self._crashes.pop(fault))
        if fault.kind == "join":
            if worker in self._live:
                return None
            self._live[worker] = None
            self._last_version[worker] = -1  # a new life has read nothing
            return WorkerJoined(fault.time, worker)
        if worker not in self._live:
            return None
        del self._live[worker]
        ticket = self._in_flight(worker)
        if ticket is not None:
            self.cancel(ticket)
        return WorkerLost(fault.time, worker, () if ticket is None else (ticket.id,))

    def _in_flight(self, worker: int) -> Ticket | None:
        """A search, since losses are rare and a table of who does what would cost every ticket."""
        for _, kind, number, what in self._heap:
            if kind not in _NO_TICKET and what.worker == worker and number not in self._void:
                ticket: Ticket = what
                return ticket
        return None

    def _push_next_crash(self, crashes: Iterator[Fault]) -> None:
        fault = next(crashes, None)
        if fault is not None:
            self._crashes[fault] = crashes
            self._push(fault.time, _FAULT, fault)

    # ------------------------------------------------------------ communication

    def _transfer_out(self, now: float) -> float:
        """When a version asked for now is at the worker: all its pieces, which come at the same time."""
        self._out_free_at = max(self._out_free_at, now) + self._server_s
        return max(self._out_free_at, now + self._worker_s) + self._link_s

    def _transfer_in(self, now: float) -> float:
        """When a gradient sent now is at the server, or its pieces at all servers."""
        self._in_free_at = max(self._in_free_at, now) + self._server_s
        return max(self._in_free_at, now + self._worker_s) + self._link_s

    def _parts(self, time: float, ticket: Ticket) -> Parts:
        started, compute_s = self._times.pop(ticket.id)
        return Parts(0.0, compute_s, max(0.0, time - started - compute_s))

    # ------------------------------------------------------------ the heap

    def _push(self, time: float, kind: int, what: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, kind, self._sequence, what))
