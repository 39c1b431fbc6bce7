"""Forward and backward of one batch, or of a round as one, as a CUDA graph: one launch instead of some hundred."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from quorate.engines._before import Before, repeats_itself, what_others_hold
from quorate.engines._bench import Bench
from quorate.engines._graphs import record
from quorate.engines._groups import each_group_by_itself
from quorate.flat import Flat

#: By how much a replay may differ from the same batch computed call by call, as a share of the gradient.
_CLOSE = 1e-3
#: A graph keeps its memory for good, and a round that needs a larger share of a device keeps it busy anyway.
_MOST_MEMORY = 1 / 64


class Recorded:
    """The gradient of any `groups` batches of one size, at the parameters in the learner's own buffer.

    The memory it reads and writes is always the same: `start` (the model's buffers before the forward pass) is set
    before a replay; `gradient`, `after` (the buffers) and `numbers` (loss, norm) are what it leaves for a while.
    """

    def __init__(self, bench: Bench, samples: int, groups: int = 1) -> None:
        device = bench.learner.flat.buffer.device
        self._bench, self.samples, self._groups = bench, samples, groups
        self._indices = torch.arange(groups * samples, device=device) % (bench.task.samples() or samples)
        self.start, self.after = bench.buffers.flat.copy(), bench.buffers.flat.copy()
        self.gradient = Flat(bench.learner.flat.layout, device)
        self._recording = record(self._compute, bench.learner.clear_gradients, partial(what_others_hold, bench), device)
        self.numbers = self._recording.made
        #: Whether every parameter has a gradient.
        self.is_whole = all(parameter.grad is not None for parameter in bench.learner.params)
        bench.learner.clear_gradients()

    def _compute(self) -> Tensor:
        """Gives the loss and the norm of the gradient, which is finite if and only if every element is."""
        bench = self._bench
        bench.buffers.load(self.start.views)
        with _grouped(bench, self._groups):
            loss = bench.task.loss(bench.learner.model, bench.task.batch(self._indices, self._indices.device))
            loss.backward()  # type: ignore[no-untyped-call]
        bench.buffers.save(self.after.views)
        there = [parameter.grad for parameter in bench.learner.params]
        grads = [grad for grad in there if grad is not None]
        views = [view for view, grad in zip(self.gradient.views, there, strict=True) if grad is not None]
        torch._foreach_copy_(views, grads)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return torch.stack([loss.detach().double(), norm.double()])

    def is_of(self, samples: Sequence[int]) -> bool:
        """Whether batches of these sizes can be replayed."""
        return len(samples) == self._groups and all(one == self.samples for one in samples)

    def replay(self, batches: Sequence[int]) -> None:
        """Compute the gradient of these batches, by their numbers."""
        self._indices.copy_(self._bench.batches.samples(batches))
        self._bench.batches.seed(batches[0])
        self._recording.graph.replay()
        self._bench.buffers.left_behind()


def recorded(bench: Bench, groups: int = 1) -> Recorded | None:
    """A recording for so many batches of the usual size; None where it cannot be made, or is not the same as computing.

    Whatever a loss does in Python is done once, when it is recorded: a loss that draws numbers from Python, counts its
    calls or waits for the device cannot be. So some batches are computed both ways, and compared.
    """
    batches = range(groups)
    data_is_there = bench.task.index_device.type == bench.learner.flat.buffer.device.type
    if not data_is_there or len({bench.ledger.size(batch) for batch in batches}) > 1:
        return None
    before = Before(bench)
    made = _tried(bench, batches, before)
    if made is None:
        before.restore()
    return made


def _tried(bench: Bench, batches: Sequence[int], before: Before) -> Recorded | None:
    groups = len(batches)
    if share_of_memory(bench, batches) > _MOST_MEMORY:
        return None
    with _grouped(bench, groups):
        repeats = repeats_itself(bench, batches)
    if not repeats or before.has_other_parameters():
        return None
    try:
        made = Recorded(bench, bench.ledger.size(0), groups)
    except Exception:  # torch says so in many ways; call by call it has just worked
        return None
    bench.buffers.reset()
    with _grouped(bench, groups):
        apart = [grad for grad in bench.alone(*batches) if grad is not None]
    made.replay(batches)
    bench.buffers.reset()
    if not made.is_whole or len(apart) < len(made.gradient.views) or not bench.short_batch_is_whole():
        return None
    differences = torch._foreach_sub(made.gradient.views, apart)
    norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(one))) for one in (list(differences), apart)]
    return made if bool(norms[0] <= _CLOSE * norms[1] + 1e-12) else None


def share_of_memory(bench: Bench, batches: Sequence[int]) -> float:
    """What computing these as one takes of the GPU's memory."""
    device = bench.learner.flat.buffer.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with _grouped(bench, len(batches)):
            bench.alone(*batches)
    except torch.OutOfMemoryError:
        return math.inf
    needed = torch.cuda.max_memory_allocated(device) - before
    return needed / torch.cuda.get_device_properties(device).total_memory


def _grouped(bench: Bench, groups: int) -> AbstractContextManager[None]:
    return each_group_by_itself(bench.learner.model, groups) if groups > 1 else nullcontext()
