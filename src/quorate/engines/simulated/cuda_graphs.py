"""Gradients as CUDA graphs: one launch instead of a few hundred kernel calls."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quorate.engines.simulated.asynchronous import GradientFacts, GradientMemory, PooledGradients
from quorate.engines.simulated.batchnorm import batch_norm_per_group
from quorate.engines.simulated.model import WorkerModel
from quorate.engines.simulated.trial_snapshot import TrialSnapshot, objects_to_keep_alive, repeats_itself
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.policies import Policy

_WARM_UPS = 3


class CapturedGraph(NamedTuple):
    """A CUDA graph with its output, which every launch overwrites.

    held: objects whose memory the graph reads, kept alive as long as the graph.
    """

    graph: torch.cuda.CUDAGraph
    output: Tensor
    held: Any


def capture(
    compute: Callable[[], Tensor], clear: Callable[[], None], hold: Callable[[], Any], device: torch.device
) -> CapturedGraph:
    """Capture `compute` as a CUDA graph; raises torch's error where it cannot be captured.

    `compute` runs a few times before, with `clear` after each run: libraries initialise in their first calls, which
    cannot be captured.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        try:
            warm_up_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            warm_up_stream.wait_stream(stream)
            with torch.cuda.stream(warm_up_stream):
                for _ in range(_WARM_UPS):
                    compute()
                    clear()
            stream.wait_stream(warm_up_stream)
            held, graph = hold(), torch.cuda.CUDAGraph()
            with _no_garbage_collection(), torch.cuda.graph(graph):
                output = compute()
        except Exception:
            torch.cuda.synchronize()
            torch.cuda.set_stream(stream)  # a failed capture leaves torch's capture stream set
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # and the generator in capture mode
            raise
    return CapturedGraph(graph, output, held)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing the graph of an earlier run during a capture would break the capture."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


#: Largest difference between a graph and the same batch computed without a graph, as a share of the gradient's norm.
_CLOSE = 1e-3
#: Largest share of the GPU's memory for a graph, which keeps its memory. A larger round keeps the GPU busy anyway.
_MOST_MEMORY = 1 / 64


class GradientGraph:
    """The gradient of any `groups` batches of one size, at the parameters in the learner's own buffer.

    It always reads and writes the same memory. Before a launch the caller sets `start` (the model's buffers before the
    forward pass). A launch writes `gradient`, `after` (the buffers after the forward pass) and `numbers` (loss, norm).
    """

    def __init__(self, worker: WorkerModel, samples: int, groups: int = 1) -> None:
        device = worker.learner.flat.buffer.device
        self._worker, self.samples, self._groups = worker, samples, groups
        self._indices = torch.arange(groups * samples, device=device) % (worker.task.samples() or samples)
        self.start, self.after = worker.buffers.flat.copy(), worker.buffers.flat.copy()
        self.gradient = Flat(worker.learner.flat.layout, device)
        self._captured = capture(
            self._compute, worker.learner.clear_gradients, partial(objects_to_keep_alive, worker), device
        )
        self.numbers = self._captured.output
        self.has_all_gradients = all(parameter.grad is not None for parameter in worker.learner.params)
        worker.learner.clear_gradients()

    def _compute(self) -> Tensor:
        """Returns the loss and the norm of the gradient; the norm is finite if and only if every element is."""
        worker = self._worker
        worker.buffers.load(self.start.views)
        with batch_norm_per_group(worker.learner.model, self._groups):
            loss = worker.task.loss(worker.learner.model, worker.task.batch(self._indices, self._indices.device))
            loss.backward()  # type: ignore[no-untyped-call]
        worker.buffers.save(self.after.views)
        grads = worker.learner.gradients()
        pairs = zip(self.gradient.views, worker.learner.params, strict=True)
        torch._foreach_copy_([view for view, parameter in pairs if parameter.grad is not None], grads)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return torch.stack([loss.detach().double(), norm.double()])

    def is_of(self, samples: Sequence[int]) -> bool:
        """Whether this graph computes batches of these sizes."""
        return len(samples) == self._groups and all(one == self.samples for one in samples)

    def launch(self, batches: Sequence[int]) -> None:
        """Compute the gradient of the batches with these numbers."""
        self._indices.copy_(self._worker.batches.samples(batches))
        self._worker.batches.seed(batches[0])
        self._captured.graph.replay()
        self._worker.buffers.left_behind()


def gradient_graph(worker: WorkerModel, groups: int = 1) -> GradientGraph | None:
    """A graph for `groups` batches of the usual size; None where capturing fails or changes the gradient.

    The Python code of a loss runs only once, during the capture. A loss that draws random numbers in Python, counts
    its calls or waits for the device cannot be captured. So a few batches are computed both ways and compared.
    """
    batches = range(groups)
    data_on_device = worker.task.index_device.type == worker.learner.flat.buffer.device.type
    if not data_on_device or len({worker.ledger.size(batch) for batch in batches}) > 1:
        return None
    before = TrialSnapshot(worker)
    graph = _try_graph(worker, batches, before)
    if graph is None:
        before.restore()
    return graph


def _try_graph(worker: WorkerModel, batches: Sequence[int], before: TrialSnapshot) -> GradientGraph | None:
    groups = len(batches)
    if share_of_memory(worker, batches) > _MOST_MEMORY:
        return None
    with batch_norm_per_group(worker.learner.model, groups):
        repeats = repeats_itself(worker, batches)
    if not repeats or before.parameters_changed():
        return None
    try:
        graph = GradientGraph(worker, worker.ledger.size(0), groups)
    except Exception:  # torch raises many types; without a graph the same loss has just worked
        return None
    worker.buffers.reset()
    with batch_norm_per_group(worker.learner.model, groups):
        expected = [grad for grad in worker.trial_gradient(*batches) if grad is not None]
    graph.launch(batches)
    worker.buffers.reset()
    complete = graph.has_all_gradients and len(expected) == len(graph.gradient.views)
    if not complete or not worker.last_batch_has_all_gradients():
        return None
    differences = torch._foreach_sub(graph.gradient.views, expected)
    norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(one))) for one in (list(differences), expected)]
    return graph if bool(norms[0] <= _CLOSE * norms[1] + 1e-12) else None


def share_of_memory(worker: WorkerModel, batches: Sequence[int]) -> float:
    """Share of the GPU's memory that the gradient of these batches as one needs."""
    device = worker.learner.flat.buffer.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with batch_norm_per_group(worker.learner.model, len(batches)):
            worker.trial_gradient(*batches)
    except torch.OutOfMemoryError:
        return math.inf
    needed = torch.cuda.max_memory_allocated(device) - before
    return needed / torch.cuda.get_device_properties(device).total_memory


class _Slot(GradientMemory):
    """numbers: loss and norm in pinned memory, valid after the event `done`."""

    def __init__(self, worker: WorkerModel) -> None:
        super().__init__(worker)
        self.numbers = torch.zeros(2, dtype=torch.float64, pin_memory=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]


class GraphedGradients(PooledGradients[_Slot]):
    """As `KeptGradients`, but several times as fast for batches of the usual size.

    Loss and norm are copied to the CPU as soon as they are computed, and read when the ticket arrives. By then the copy
    is usually done, so neither the device nor the CPU waits.
    """

    def __init__(self, worker: WorkerModel, policy: Policy, graph: GradientGraph) -> None:
        super().__init__(worker, policy, graph.samples)
        self._graph = graph
        self._versions_read: dict[int, Flat] = {}  # ticket -> version it read, for delay compensation
        self._newest = self.learner.flat.copy() if self._history else None

    def _new_slot(self) -> _Slot:
        return _Slot(self.worker)

    def _begin(self, ticket: Ticket) -> _Slot:
        slot, graph = self._free_slot(), self._graph
        if ticket.version == self.learner.version:
            graph.start.buffer.copy_(self.worker.buffers.flat.buffer)
            graph.launch([ticket.batch])
        else:
            self._launch_at_older(ticket)
        slot.gradient.buffer.copy_(graph.gradient.buffer)
        slot.read_buffers.buffer.copy_(graph.start.buffer)
        slot.after_buffers.buffer.copy_(graph.after.buffer)
        slot.numbers.copy_(graph.numbers, non_blocking=True)
        slot.done.record()
        if self._compensation:
            self._versions_read[ticket.id] = self._snapshot(ticket.version)
        return slot

    def _launch_at_older(self, ticket: Ticket) -> None:
        """The graph reads the memory of the newest version, so the older version is copied there for the launch."""
        assert self._newest is not None, "only a policy with a history starts tickets on older versions"
        flat, old = self.learner.flat, self._old[ticket.version]
        self._newest.buffer.copy_(flat.buffer)
        flat.buffer.copy_(old.flat.buffer)
        self._graph.start.buffer.copy_(old.buffers.buffer)
        self._graph.launch([ticket.batch])
        flat.buffer.copy_(self._newest.buffer)

    def _due(self, ticket: Ticket, slot: _Slot) -> GradientFacts:
        slot.done.synchronize()
        loss, norm = slot.numbers.tolist()
        return GradientFacts(loss, norm, self._versions_read.pop(ticket.id, None))

    def _release(self, ticket: Ticket) -> None:
        self._versions_read.pop(ticket.id, None)
        super()._release(ticket)
