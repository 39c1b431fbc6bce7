"""Forward and backward of several batches in one go, each at a version of its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from quorate.engines._batchable import Batchable
from quorate.engines._before import Before, repeats_itself, tensors_of_task, what_others_hold
from quorate.engines._bench import Bench
from quorate.engines._graphs import Recording, record
from quorate.engines._recorded import share_of_memory
from quorate.engines._together import full_precision, without_chance
from quorate.flat import Layout
from quorate.learner import global_norm

#: So many fill a GPU with the small batches of a worker; more would take more memory, and gain little.
MOST = 16
#: By how much side by side may differ from one by one, as a share of the gradient, where nothing is left to chance.
_CLOSE = 1e-2
#: All lanes may take this share of a GPU's memory: others may want to train beside.
_MOST_MEMORY = 1 / 16


class Rows:
    """Several flats of one layout below each other: `rows[i]` has the bytes of one, `views[j]` is a tensor of all."""

    def __init__(self, layout: Layout, count: int, device: torch.device) -> None:
        table = torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device)
        self.rows = list(table.unbind())
        self.views = [
            table[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(count, *shape)
            for offset, shape, dtype in zip(layout.offsets, layout.shapes, layout.dtypes, strict=True)
        ]

    def vectors(self, dtype: torch.dtype) -> Tensor:
        """Where all tensors are of one type: each row as a vector."""
        return torch.stack(self.rows).view(dtype)


class _Losses(nn.Module):
    """The loss as a module, so that torch can call it with other parameters; also gives the buffers afterwards."""

    def __init__(self, bench: Bench, buffers: Sequence[str]) -> None:
        super().__init__()
        self.model = bench.learner.model
        self._task, self._names = bench.task.task, buffers

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss: Tensor = self._task.loss(self.model, batch)
        after = dict(self.named_buffers(remove_duplicate=False)) if self._names else {}
        return loss.reshape(()), tuple(after[name] for name in self._names)


class Lanes:
    """The gradients of up to `count` batches of one size: lane i computes at row i of `points` and `start`.

    These (parameters, buffers) are set before; `gradients`, `after` (the buffers) and `numbers` (loss and norm of each)
    are there after `compute`. A lane that has nothing to do computes what it last had.
    """

    def __init__(self, bench: Bench, samples: int, count: int) -> None:
        device = bench.learner.flat.buffer.device
        self._bench, self.samples, self.count = bench, samples, count
        parameters, buffers = bench.learner.flat.layout, bench.buffers.flat.layout
        self.points, self.gradients = (Rows(parameters, count, device) for _ in range(2))
        self.start, self.after = (Rows(buffers, count, device) for _ in range(2))
        self._indices = torch.zeros(count * samples, dtype=torch.long, device=bench.task.index_device)
        model = bench.learner.model
        names = {id(one): f"model.{name}" for name, one in [*model.named_parameters(), *model.named_buffers()]}
        self._parameters = [names[id(parameter)] for parameter in bench.learner.params]
        self._buffers = [names[id(buffer)] for buffer in bench.buffers.live()]
        self._losses = _Losses(bench, self._buffers)
        self._recording: Recording | None = None
        self.numbers = torch.zeros(count, 2, device=device)

    def record(self) -> None:
        """From now on, compute by replaying a CUDA graph."""
        device = self.points.rows[0].device
        self._recording = record(self._compute, lambda: None, partial(what_others_hold, self._bench), device)
        self.numbers = self._recording.made

    def compute(self, batches: Sequence[int]) -> None:
        """The gradients of these batches, at most `count`, in the first lanes."""
        found = torch.cat([self._bench.batches.samples([batch]) for batch in batches])
        self._indices[: len(found)].copy_(found)
        self._bench.batches.seed(batches[0])  # chance is drawn for all lanes at once
        if self._recording is None:
            self.numbers = self._compute()
        else:
            self._recording.graph.replay()

    def _compute(self) -> Tensor:
        bench = self._bench
        batch = _split(bench.task.batch(self._indices, self.points.rows[0].device), self.count, self.samples)
        with Batchable(), warnings.catch_warnings():
            # What torch has no rule for is looped over: slower, and right.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            grads, (losses, after) = vmap(self._gradient, randomness="different")(
                tuple(self.points.views), tuple(self.start.views), batch
            )
        if losses.requires_grad or any(grad.requires_grad for grad in grads):
            raise RuntimeError("the loss depends on parameters other than those that the model has while it is called")
        torch._foreach_copy_(self.gradients.views, list(grads))
        if self.after.views:
            torch._foreach_copy_(self.after.views, list(after))
        norms = torch.linalg.vector_norm(self.gradients.vectors(grads[0].dtype), dim=1)
        return torch.stack([losses.double(), norms.double()], dim=1)

    def _gradient(self, points: tuple[Tensor, ...], start: tuple[Tensor, ...], batch: Any) -> Any:
        """Of one lane, as if there were no other."""
        # Copies, since BatchNorm writes into them; and given, not merely seen, so that it may.
        return grad_and_value(self._loss, has_aux=True)(points, [buffer.clone() for buffer in start], batch)

    def _loss(self, points: Sequence[Tensor], buffers: Sequence[Tensor], batch: Any) -> Any:
        named = dict(zip([*self._parameters, *self._buffers], [*points, *buffers], strict=True))
        return functional_call(self._losses, named, (batch,))


def _split(batch: Any, count: int, samples: int) -> Any:
    """A batch for all lanes as one for each: every tensor [count·samples, …] as [count, samples, …]."""
    if isinstance(batch, Tensor):
        return batch.view(count, samples, *batch.shape[1:])
    if isinstance(batch, dict):
        return {key: _split(one, count, samples) for key, one in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(_split(one, count, samples) for one in batch)
    raise TypeError(f"a batch holds a {type(batch).__name__}, which cannot be split into lanes")


def lanes(bench: Bench, count: int, graphs: bool) -> Lanes | None:
    """Lanes for batches of the usual size; None where gradients cannot be computed side by side. Changes nothing.

    graphs: record them, on a GPU. Whether it is the same is found out by trying, as for a round as one batch.
    """
    if bench.ledger.batches_per_epoch is not None and bench.ledger.batches_per_epoch < 2:
        return None
    layout = bench.learner.flat.layout
    if bench.ledger.size(0) != bench.ledger.size(1) or len(layout.runs(bench.learner.flat.buffer)) != 1:
        return None
    on_gpu = bench.learner.flat.buffer.is_cuda
    before = Before(bench)
    too_large = on_gpu and count * share_of_memory(bench, [0]) > _MOST_MEMORY
    made = None if too_large else _tried(bench, count, before)
    if made is not None and graphs and on_gpu:
        try:
            made.record()
        except Exception:  # torch says so in many ways
            made = None
    if made is None:
        before.restore()
    return made


def _tried(bench: Bench, count: int, before: Before) -> Lanes | None:
    whole = bench.short_batch_is_whole()
    bench.alone(0)  # as in training, when a model may do what it does not do without chance
    with without_chance(bench.learner.model), full_precision():
        apart = [bench.alone(batch) for batch in (0, 1)]
    if not whole or any(grad is None for grads in apart for grad in grads):
        return None
    if before.has_other_parameters() or not repeats_itself(bench, [0]):  # in lanes it would go unnoticed
        return None
    try:
        made = _side_by_side(bench, count)
        with without_chance(bench.learner.model), full_precision():
            again = bench.alone(0)  # a model may keep a lane's tensors, with which nobody else can go on
    except Exception:  # whatever a loss does that torch cannot do side by side: one by one it has just worked
        return None
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors_of_task(bench))):
        return None  # put by, to be looked at later: of lanes there is nothing to see
    abreast = [[view[lane] for view in made.gradients.views] for lane in (0, 1)]
    same = all(map(_are_close, abreast, apart)) and _are_close(again, apart[0])
    return made if same else None


def _are_close(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return global_norm([a - b for a, b in pairs]) <= _CLOSE * global_norm([b for _, b in pairs]) + 1e-6


def _side_by_side(bench: Bench, count: int) -> Lanes:
    """Lanes that have computed the first two batches at the newest version."""
    made = Lanes(bench, bench.ledger.size(0), count)
    for row, start in zip(made.points.rows, made.start.rows, strict=True):
        row.copy_(bench.learner.flat.buffer)
        start.copy_(bench.buffers.flat.buffer)
    made.compute([0, 1])  # as in training: what comes of it is chance, that it can be done is not
    with without_chance(bench.learner.model), full_precision():
        made.compute([0, 1])
    return made
