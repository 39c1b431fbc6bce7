"""The simulated cluster: tickets run in virtual time, gradients are computed in this process.

Equal seeds give equal runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor

from quorate.engines.base import Engine, Job, Outcome
from quorate.engines.shared.compute import checked_device
from quorate.engines.shared.update import KEPT_HALF, Weights, finds_nan_early
from quorate.engines.simulated.asynchronous import KeptGradients
from quorate.engines.simulated.cuda_graphs import GradientGraph, GraphedGradients, gradient_graph
from quorate.engines.simulated.model import Strategy, WorkerModel
from quorate.engines.simulated.synchronous import BigBatch, DelayedBigBatch, OneByOne, rounds_can_be_one_batch
from quorate.engines.simulated.vmapped import MOST_AT_ONCE, VmappedGradients, vmapped_model
from quorate.errors import BadInput, check_at_least
from quorate.events import Arrived, Event, Parts, Refused, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.faults import Fault, Faults, parse_faults
from quorate.latency import Latency, parse_latency
from quorate.network import Network, parse_network
from quorate.policies import Policy
from quorate.seeds import derive

_NO_OUTCOME = Outcome(None, None)


class InProcessEngine(Engine):
    """Computes the gradients of all workers with one model. Without a task it computes none and only knows sizes."""

    def __init__(self, device: str | torch.device, model_bytes: int | None) -> None:
        self.device = checked_device(device)
        self.model_bytes = model_bytes
        self._model: WorkerModel | None = None
        self._strategy: Strategy | None = None
        self._saved_settings: tuple[Tensor, bool, bool] | None = None
        self.graphs = True

    @property
    def arithmetic(self) -> str | None:
        """Name of the way gradients are combined; the same way gives the same bits."""
        return None if self._strategy is None else self._strategy.arithmetic

    def _open_model(self, job: Job, together: bool | None, arithmetic: str | None = None) -> None:
        """Make the model and choose the strategy.

        together: compute a synchronous round as one big batch, and gradients of several versions in one vmapped call
            (None: only on a GPU).
        arithmetic: that of the run to replay, where its engine had a choice.
        """
        cudnn = torch.backends.cudnn
        self._saved_settings = torch.get_rng_state(), cudnn.deterministic, cudnn.benchmark
        cudnn.deterministic, cudnn.benchmark = True, False  # equal seeds must give equal runs
        self._model = self._strategy = None  # an engine may be opened again for another run
        if job.task is None:
            return
        self._model = model = WorkerModel(job, self.device)
        wanted = self.device.type != "cpu" if together is None else together
        if finds_nan_early(job.policy) or (arithmetic or "").startswith(KeptGradients.arithmetic):
            rounds = self.workers > 1 and job.policy.takes_everybody and not job.learning.delay_compensation
            if rounds and wanted and rounds_can_be_one_batch(model):
                self._strategy = DelayedBigBatch(model, job.policy)
            else:
                # A single worker that reads old versions can compute its next tickets in advance.
                at_once = min(MOST_AT_ONCE, max(self.workers, job.policy.history + 1)) if wanted else 1
                self._strategy = self._asynchronous(model, job.policy, at_once, half=arithmetic == KEPT_HALF)
        elif wanted and rounds_can_be_one_batch(model):
            self._strategy = BigBatch(model, self._graph(model, job.policy.begin(self.workers).per_update))
        else:
            self._strategy = OneByOne(model)

    def _asynchronous(self, model: WorkerModel, policy: Policy, at_once: int, half: bool) -> Strategy:
        """at_once: the most gradients in one vmapped call."""
        if half:
            return KeptGradients(model, policy, half)
        vmapped = vmapped_model(model, at_once, self.graphs) if at_once > 1 else None
        if vmapped is not None:
            return VmappedGradients(model, policy, vmapped)
        graph = self._graph(model)
        return KeptGradients(model, policy) if graph is None else GraphedGradients(model, policy, graph)

    def _graph(self, model: WorkerModel, groups: int = 1) -> GradientGraph | None:
        return gradient_graph(model, groups) if self.device.type == "cuda" and self.graphs else None

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights, reason: str) -> Outcome:
        return _NO_OUTCOME if self._strategy is None else self._strategy.apply(tickets, weights)

    def drop(self, ticket: Ticket) -> None:
        if self._strategy is not None:
            self._strategy.ended(ticket)

    def evaluate(self) -> dict[str, float]:
        if self._model is None:
            return {}
        model = self._model
        model.buffers.settle()
        with model.learner.evaluation() as net:
            measures = model.task.evaluate(net, derive(model.seed, "evaluate", model.learner.version))
        model.buffers.reset()  # an evaluation must not change the model's buffers
        return measures

    def parameters(self) -> dict[str, Tensor]:
        if self._model is None:
            return {}
        self._model.buffers.settle()
        return self._model.learner.state_dict()

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        if self._model is None:
            return None
        self._model.buffers.settle()
        return self._model.learner.average_dict()

    def parameter_bytes(self) -> int:
        return (self.model_bytes or 0) if self._model is None else self._model.learner.nbytes

    def close(self) -> None:
        if self._saved_settings is not None:
            state, deterministic, benchmark = self._saved_settings
            self._saved_settings = None
            torch.set_rng_state(state)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark


# Kinds of heap entries; at equal times the lower one comes first. A worker that dies as it finishes is lost.
_FAULT, _ARRIVAL, _UPLOAD, _TIMER = 0, 1, 2, 3
_NO_TICKET = (_FAULT, _TIMER)
_COMPACT_FROM = 1024
_MOST_WORKERS = 100_000  # a round of this size takes some seconds to simulate


class Simulated(InProcessEngine):
    """Workers whose times come from a latency model; the clock jumps from event to event.

    workers: number of workers at the start.
    latency: seconds a ticket takes, as a model or its text form, e.g. "shifted-exp:0.05,0.025".
    network: communication time on top of the latency, as a model or its text form; None: communication is free.
    faults: when workers leave and come back, as a script or its text form.
    device: where gradients are computed, e.g. "cpu" or "cuda".
    together: compute a synchronous round as one big batch, and the gradients of asynchronous workers in one vmapped
        call, each at its own version (None: on a GPU yes, on a CPU no). On a CPU the vmapped call halves the cost of
        tiny nets and doubles that of large ones.
    graphs: on a GPU, capture the computation of gradients as CUDA graphs.
        The engine tests both on the first batches. Switch them off for a loss that depends on Python state (a
        counter, `random`) in a way that this test does not show.
    model_bytes: size of a version and of a gradient, for runs without gradients.
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
        check_at_least("workers", workers, 1, _MOST_WORKERS)
        super().__init__(device, model_bytes)
        self.workers = workers
        self.latency = parse_latency(latency) if isinstance(latency, str) else latency
        self.network = parse_network(network) if isinstance(network, str) else network
        self.faults = parse_faults(faults) if isinstance(faults, str) else faults
        for fault in () if self.faults is None else self.faults.script:
            check_at_least("a worker of faults", fault.worker, 0, _MOST_WORKERS)
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
            # Rounding depends on torch's number of threads, and a replay must round in the same way.
            **({} if self.arithmetic is None else {"threads": torch.get_num_threads()}),
        }

    def open(self, job: Job) -> None:
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._now = 0.0
        script = () if self.faults is None else self.faults.script
        most_workers = max([self.workers, *(fault.worker + 1 for fault in script)])  # scripts may add workers later
        self._draw = self.latency.sampler(job.seed, most_workers)
        self._live: dict[int, None] = {}
        self._cancelled: set[int] = set()  # tickets in the heap that were cancelled or lost
        # By worker, in lists because a run may have ten thousand workers.
        self._steps = [0] * most_workers  # tickets started
        self._last_version = [-1] * most_workers  # version of the last ticket
        self._repeats = [0] * most_workers  # earlier tickets of the worker on that version
        self._times: dict[int, tuple[float, float]] = {}  # ticket -> start time, seconds of computing
        self._out_free_at = self._in_free_at = 0.0  # when the server's link has finished its queue
        self._crashes: dict[Fault, Iterator[Fault]] = {}  # next random fault of a worker -> its later faults
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
        # The first tickets of all workers on a version share a row; a worker's second ticket is in the next row.
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
        ready = now if repeat else self._transfer_out(now)  # on a repeat the worker already has the version
        self._times[ticket.id] = (now, seconds)
        heappush(self._heap, (ready + seconds, _UPLOAD, ticket.id, ticket))

    def cancel(self, ticket: Ticket) -> None:
        self._times.pop(ticket.id, None)
        if self._strategy is not None:
            self._strategy.ended(ticket)
        self._cancelled.add(ticket.id)
        # A cancelled entry stays in the heap until its time comes. Under heavy tails that may be never, so the heap
        # is compacted when more than half of its entries are cancelled.
        if len(self._cancelled) > _COMPACT_FROM and 2 * len(self._cancelled) > len(self._heap):
            cancelled = self._cancelled
            self._heap[:] = [entry for entry in self._heap if entry[1] in _NO_TICKET or entry[2] not in cancelled]
            heapify(self._heap)
            cancelled.clear()

    def set_timer(self, at: float, key: int) -> None:
        self._push(max(at, self._now), _TIMER, key)

    def next_event(self, until: float | None) -> Event | None:
        heap, cancelled = self._heap, self._cancelled
        while heap:
            if until is not None and heap[0][0] > until:
                self._now = until
                return None
            time, kind, number, what = heappop(heap)
            if kind in _NO_TICKET:
                self._now = time
                event = Timer(time, what) if kind == _TIMER else self._apply_fault(what)
                if event is not None:
                    return event
            elif number in cancelled:
                cancelled.remove(number)
            elif kind == _UPLOAD:
                heappush(heap, (self._transfer_in(time), _ARRIVAL, number, what))
            else:
                self._now = time
                if self._strategy is not None and not self._strategy.arrived(what):
                    return Refused(time, what)
                return Arrived(time, what, self._parts(time, what) if self.network is not None else None)
        return None

    # ------------------------------------------------------------ faults

    def _apply_fault(self, fault: Fault) -> Event | None:
        worker = fault.worker
        if fault in self._crashes:
            self._push_next_crash(self._crashes.pop(fault))
        if fault.kind == "join":
            if worker in self._live:
                return None
            self._live[worker] = None
            self._last_version[worker] = -1  # a worker that rejoins has no version in memory
            return WorkerJoined(fault.time, worker)
        if worker not in self._live:
            return None
        del self._live[worker]
        ticket = self._in_flight(worker)
        if ticket is not None:
            self.cancel(ticket)
        return WorkerLost(fault.time, worker, () if ticket is None else (ticket.id,))

    def _in_flight(self, worker: int) -> Ticket | None:
        """The worker's open ticket. Found by a search: losses are rare, and a table would slow down every ticket."""
        tickets = (entry[3] for entry in self._heap if entry[1] not in _NO_TICKET)
        return next((one for one in tickets if one.worker == worker and one.id not in self._cancelled), None)

    def _push_next_crash(self, crashes: Iterator[Fault]) -> None:
        fault = next(crashes, None)
        if fault is not None:
            self._crashes[fault] = crashes
            self._push(fault.time, _FAULT, fault)

    # ------------------------------------------------------------ communication

    def _transfer_out(self, now: float) -> float:
        """When a version requested now has reached the worker; all its shards arrive at the same time."""
        self._out_free_at = max(self._out_free_at, now) + self._server_s
        return max(self._out_free_at, now + self._worker_s) + self._link_s

    def _transfer_in(self, now: float) -> float:
        """When a gradient sent now has reached the server, or its shards all servers."""
        self._in_free_at = max(self._in_free_at, now) + self._server_s
        return max(self._in_free_at, now + self._worker_s) + self._link_s

    def _parts(self, time: float, ticket: Ticket) -> Parts:
        started, compute_s = self._times.pop(ticket.id)
        return Parts(0.0, compute_s, max(0.0, time - started - compute_s))

    def _push(self, time: float, kind: int, what: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, kind, self._sequence, what))
