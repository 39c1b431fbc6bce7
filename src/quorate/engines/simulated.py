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
_COMPACT_AT_LEAST = 1024


class Simulated(InProcessEngine):
    """Workers whose times come from a latency model; the clock jumps from event to event.

    workers: how many there are at the start.
    latency: seconds a ticket takes, as a model or its text form, e.g. "shifted-exp:0.05,0.025".
    network: communication on top, as a model or its text form; None: free.
    faults: when workers leave and come back, as a script or its text form.
    device: where gradients are computed, e.g. "cpu" or "cuda".
    together: compute a synchronous round as one big batch. None: on a GPU yes, on a CPU no.
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
        model_bytes: int | None = None,
    ) -> None:
        check_at_least("workers", workers, 1)
        super().__init__(device, model_bytes)
        self.workers = workers
        self.latency = parse_latency(latency) if isinstance(latency, str) else latency
        self.network = parse_network(network) if isinstance(network, str) else network
        self.faults = parse_faults(faults) if isinstance(faults, str) else faults
        self.together = together

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "latency": self.latency.text(),
            "network": None if self.network is None else self.network.text(),
            "faults": None if self.faults is None else self.faults.source,
            "device": str(self.device),
            "arithmetic": self.arithmetic,
        }

    def open(self, job: Job) -> None:
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._now = 0.0
        self._draw = self.latency.sampler(job.seed, self.workers)
        self._live: dict[int, None] = {}
        self._current: dict[int, Ticket] = {}  # worker -> ticket in flight
        self._stale = 0  # entries of the heap whose ticket was cancelled or lost
        self._steps: dict[int, int] = {}
        self._last: dict[int, tuple[int, int]] = {}  # worker -> version of its last ticket, how often in a row
        self._times: dict[int, tuple[float, float]] = {}  # ticket -> when started, seconds of computing
        self._out_free_at = self._in_free_at = 0.0  # when the server's link has served what it has
        self._crashes: dict[Fault, Iterator[Fault]] = {}  # next random fault of a worker -> those after it
        self._open_model(job, self.together)
        if self.network is not None and not self.parameter_bytes():
            raise BadInput("a network is given, but not what goes over it; give model_bytes (--model-bytes)")
        for worker in range(self.workers):
            self._push(0.0, _FAULT, Fault(0.0, worker, "join"))
        if self.faults is not None:
            for fault in self.faults.script:
                self._push(fault.time, _FAULT, fault)
            for worker in range(self.workers):
                self._push_next_crash(self.faults.crashes(job.seed, worker))

    # ------------------------------------------------------------ tickets

    def start(self, ticket: Ticket) -> None:
        worker, version, now = ticket.worker, ticket.version, self._now
        step = self._steps.get(worker, 0)
        self._steps[worker] = step + 1
        # All first tickets of a version are one row; a second one of the same worker is in the next row.
        last, repeat = self._last.get(worker, (-1, 0))
        repeat = repeat + 1 if last == version else 0
        self._last[worker] = (version, repeat)
        seconds = self._draw(worker, step, version + (repeat << 40), now)
        self._current[worker] = ticket
        if self._strategy is not None:
            self._strategy.started(ticket)
        self._sequence = sequence = self._sequence + 1
        if self.network is None:
            heappush(self._heap, (now + seconds, _ARRIVAL, sequence, ticket))
            return
        ready = now if repeat else self._transfer_out(now)  # the version may be there already
        self._times[ticket.id] = (now, seconds)
        heappush(self._heap, (ready + seconds, _UPLOAD, sequence, ticket))

    def cancel(self, ticket: Ticket) -> None:
        del self._current[ticket.worker]
        self._times.pop(ticket.id, None)
        if self._strategy is not None:
            self._strategy.ended(ticket, arrived=False)
        self._forget_entry()

    def set_timer(self, at: float, key: int) -> None:
        self._push(max(at, self._now), _TIMER, key)

    def next_event(self, until: float | None) -> Event | None:
        heap, current = self._heap, self._current
        while heap:
            if until is not None and heap[0][0] > until:
                self._now = until
                return None
            time, kind, _, what = heappop(heap)
            if kind == _ARRIVAL:
                ticket: Ticket = what
                if current.get(ticket.worker) is not ticket:
                    self._stale -= 1
                    continue
                del current[ticket.worker]
                self._now = time
                if self._strategy is not None and not self._strategy.arrived(ticket):
                    return Refused(time, ticket)
                return Arrived(time, ticket, self._parts(time, ticket) if self.network is not None else None)
            if kind == _UPLOAD:
                if current.get(what.worker) is what:
                    self._push(self._transfer_in(time), _ARRIVAL, what)
                else:
                    self._stale -= 1
                continue
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
            return WorkerJoined(fault.time, worker)
        if worker not in self._live:
            return None
        del self._live[worker]
        ticket = self._current.pop(worker, None)
        if ticket is not None:
            self._times.pop(ticket.id, None)
            if self._strategy is not None:
                self._strategy.ended(ticket, arrived=False)
            self._forget_entry()
        return WorkerLost(fault.time, worker, () if ticket is None else (ticket.id,))

    def _push_next_crash(self, crashes: Iterator[Fault]) -> None:
        fault = next(crashes, None)
        if fault is not None:
            self._crashes[fault] = crashes
            self._push(fault.time, _FAULT, fault)

    # ------------------------------------------------------------ communication

    def _transfer_out(self, now: float) -> float:
        """When a version asked for now is at the worker."""
        network, size = self.network, self.parameter_bytes()
        assert network is not None
        self._out_free_at = max(self._out_free_at, now) + size / network.server_bandwidth
        return max(self._out_free_at, now + size / network.bandwidth) + network.latency_s

    def _transfer_in(self, now: float) -> float:
        """When a gradient sent now is at the server."""
        network, size = self.network, self.parameter_bytes()
        assert network is not None
        self._in_free_at = max(self._in_free_at, now) + size / network.server_bandwidth
        return max(self._in_free_at, now + size / network.bandwidth) + network.latency_s

    def _parts(self, time: float, ticket: Ticket) -> Parts:
        started, compute_s = self._times.pop(ticket.id)
        return Parts(0.0, compute_s, max(0.0, time - started - compute_s))

    # ------------------------------------------------------------ the heap

    def _push(self, time: float, kind: int, what: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, kind, self._sequence, what))

    def _forget_entry(self) -> None:
        """An entry of the heap is void. Far-off ones would pile up under heavy tails, so clear them out."""
        self._stale += 1
        if self._stale > _COMPACT_AT_LEAST and 2 * self._stale > len(self._heap):
            current = self._current
            self._heap[:] = [
                entry
                for entry in self._heap
                if entry[1] not in (_ARRIVAL, _UPLOAD) or current.get(entry[3].worker) is entry[3]
            ]
            heapify(self._heap)
            self._stale = 0
