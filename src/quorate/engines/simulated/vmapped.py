"""Gradients of several asynchronous tickets in one vmapped call, each at its own version.

Under vmap torch turns convolutions with different weights into one grouped convolution, for which libraries have no
fast kernels, and it computes weight norm in a loop. Here convolutions are matrix products, which vmap turns into one
batched product, and weight norm is elementwise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from quorate.engines.simulated.asynchronous import GradientFacts, GradientMemory, PooledGradients
from quorate.engines.simulated.cuda_graphs import CapturedGraph, capture, share_of_memory
from quorate.engines.simulated.model import WorkerModel
from quorate.engines.simulated.synchronous import comparable_gradients
from quorate.engines.simulated.trial_snapshot import TrialSnapshot, objects_to_keep_alive, repeats_itself, task_tensors
from quorate.events import Ticket
from quorate.flat import Layout
from quorate.learner import global_norm
from quorate.policies import Policy


class Batchable(TorchFunctionMode):
    """Replaces plain 2-d convolutions and weight norm by the functions of this file, which vmap handles fast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            return conv2d(*args, **(kwargs or {}))
        if func is torch._weight_norm:
            return weight_norm(*args, **(kwargs or {}))
        if func is Tensor.view:  # fails on the channels-outermost pictures that `conv2d` returns
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError:
                return func(args[0].contiguous(), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.conv2d`.

    The result has its channels outermost in memory. Elementwise calls keep this layout, and the next convolution needs
    it.
    """
    if groups != 1 or isinstance(padding, str) or x.dim() != 4:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    (stride_y, stride_x), (pad_y, pad_x), (step_y, step_x) = _pair(stride), _pair(padding), _pair(dilation)
    out, channels, rows, columns = weight.shape
    if pad_y or pad_x:
        x = functional.pad(x, (pad_x, pad_x, pad_y, pad_y))
    n, _, height, width = x.shape
    height = (height - step_y * (rows - 1) - 1) // stride_y + 1
    width = (width - step_x * (columns - 1) - 1) // stride_x + 1
    x = x.transpose(0, 1)
    windows = tuple(
        (_strided(stride_y, step_y * row, height), _strided(stride_x, step_x * column, width))
        for row in range(rows)
        for column in range(columns)
    )
    patches = x[:, :, *windows[0]] if len(windows) == 1 else _Patches.apply(x, windows)  # type: ignore[no-untyped-call]
    matrix = patches.reshape(channels * rows * columns, -1)
    y = (weight.reshape(out, -1) @ matrix).view(out, n, height, width)
    if bias is not None:
        y = y + bias[:, None, None, None]
    return y.transpose(0, 1)


class _Patches(torch.autograd.Function):
    """The input of each kernel element, from pictures [channels, n, h, w]: [channels, kernel elements, n, h', w'].

    Torch's own backward would make one picture of zeros for every kernel element and add all of them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, windows: tuple[tuple[slice, slice], ...]) -> Tensor:
        return torch.stack([x[:, :, rows, columns] for rows, columns in windows], 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.shape, ctx.windows = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.new_zeros(ctx.shape)
        for index, (rows, columns) in enumerate(ctx.windows):
            total[:, :, rows, columns] += grad[:, index]
        return total, None


def weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """As `torch._weight_norm`: `length` × `direction` / |`direction`|, with the norm over all dimensions but `dim`."""
    others = [other for other in range(direction.dim()) if other != dim % direction.dim()] if dim != -1 else None
    norm: Tensor = torch.linalg.vector_norm(direction, dim=others, keepdim=True)
    return direction * (length / norm)


def _strided(step: int, start: int, count: int) -> slice:
    return slice(start, start + step * (count - 1) + 1, step)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


#: Gradients in one call. This many small batches fill a GPU; more would take more memory and gain little.
MOST_AT_ONCE = 16
#: Largest difference from gradients computed one by one, as a share of their norm, with randomness switched off.
_CLOSE = 1e-2
#: Largest share of a GPU's memory for all rows, since other processes may train on the same GPU.
_MOST_MEMORY = 1 / 16


class Rows:
    """Several flats of one layout in one table: `rows[i]` holds the bytes of flat i, `views[j]` tensor j of all."""

    def __init__(self, layout: Layout, count: int, device: torch.device) -> None:
        table = torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device)
        self.rows = list(table.unbind())
        self.views = [
            table[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(count, *shape)
            for offset, shape, dtype in zip(layout.offsets, layout.shapes, layout.dtypes, strict=True)
        ]

    def vectors(self, dtype: torch.dtype) -> Tensor:
        """Each row as a vector, if all tensors have this dtype."""
        return torch.stack(self.rows).view(dtype)


class _Losses(nn.Module):
    """The loss as a module, so that torch can call it with other parameters. It also returns the buffers."""

    def __init__(self, worker: WorkerModel, buffers: Sequence[str]) -> None:
        super().__init__()
        self.model = worker.learner.model
        self._task, self._names = worker.task.task, buffers

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss: Tensor = self._task.loss(self.model, batch)
        after = dict(self.named_buffers(remove_duplicate=False)) if self._names else {}
        return loss.reshape(()), tuple(after[name] for name in self._names)


class VmappedModel:
    """The gradients of up to `count` batches of one size: batch i is computed at row i of `points` and `start`.

    The caller sets the rows of `points` (parameters) and `start` (buffers). `compute` fills `gradients`, `after`
    (buffers after the forward pass) and `numbers` (loss and norm of each row). With fewer batches, the other rows
    compute their last batch again.
    """

    def __init__(self, worker: WorkerModel, samples: int, count: int) -> None:
        device = worker.learner.flat.buffer.device
        self._worker, self.samples, self.count = worker, samples, count
        parameters, buffers = worker.learner.flat.layout, worker.buffers.flat.layout
        self.points, self.gradients = (Rows(parameters, count, device) for _ in range(2))
        self.start, self.after = (Rows(buffers, count, device) for _ in range(2))
        self._indices = torch.zeros(count * samples, dtype=torch.long, device=worker.task.index_device)
        model = worker.learner.model
        names = {id(one): f"model.{name}" for name, one in [*model.named_parameters(), *model.named_buffers()]}
        self._parameters = [names[id(parameter)] for parameter in worker.learner.params]
        self._buffers = [names[id(buffer)] for buffer in worker.buffers.live()]
        self._losses = _Losses(worker, self._buffers)
        self._captured: CapturedGraph | None = None
        self.numbers = torch.zeros(count, 2, device=device)

    def capture(self) -> None:
        """Let `compute` launch a CUDA graph from now on."""
        device = self.points.rows[0].device
        self._captured = capture(self._compute, lambda: None, partial(objects_to_keep_alive, self._worker), device)
        self.numbers = self._captured.output

    def compute(self, batches: Sequence[int]) -> None:
        """Compute these batches, at most `count`, in the first rows."""
        found = torch.cat([self._worker.batches.samples([batch]) for batch in batches])
        self._indices[: len(found)].copy_(found)
        self._worker.batches.seed(batches[0])  # one seed: random numbers are drawn for all rows at once
        if self._captured is None:
            self.numbers = self._compute()
        else:
            self._captured.graph.replay()

    def _compute(self) -> Tensor:
        worker = self._worker
        batch = _split(worker.task.batch(self._indices, self.points.rows[0].device), self.count, self.samples)
        with Batchable(), warnings.catch_warnings():
            # Torch loops over operations that have no vmap rule, which is slower but correct.
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
        """The gradient of one row."""
        # Copies of the buffers, since BatchNorm writes into them. They must be arguments: vmap forbids in-place
        # writes to captured tensors.
        return grad_and_value(self._loss, has_aux=True)(points, [buffer.clone() for buffer in start], batch)

    def _loss(self, points: Sequence[Tensor], buffers: Sequence[Tensor], batch: Any) -> Any:
        named = dict(zip([*self._parameters, *self._buffers], [*points, *buffers], strict=True))
        return functional_call(self._losses, named, (batch,))


def _split(batch: Any, count: int, samples: int) -> Any:
    """Split a batch by rows: every tensor [count·samples, …] becomes [count, samples, …]."""
    if isinstance(batch, Tensor):
        return batch.view(count, samples, *batch.shape[1:])
    if isinstance(batch, dict):
        return {key: _split(one, count, samples) for key, one in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(_split(one, count, samples) for one in batch)
    raise TypeError(f"a batch holds a {type(batch).__name__}, which cannot be split by rows")


def vmapped_model(worker: WorkerModel, count: int, graphs: bool) -> VmappedModel | None:
    """A model for `count` batches of the usual size; None where vmap fails or changes the gradients.

    That is tested on the first batches; the test changes no state.

    graphs: capture a CUDA graph, on a GPU.
    """
    if worker.ledger.batches_per_epoch is not None and worker.ledger.batches_per_epoch < 2:
        return None
    layout = worker.learner.flat.layout
    if worker.ledger.size(0) != worker.ledger.size(1) or len(layout.runs(worker.learner.flat.buffer)) != 1:
        return None
    on_gpu = worker.learner.flat.buffer.is_cuda
    before = TrialSnapshot(worker)
    too_large = on_gpu and count * share_of_memory(worker, [0]) > _MOST_MEMORY
    vmapped = None if too_large else _try_vmap(worker, count, before)
    if vmapped is not None and graphs and on_gpu:
        try:
            vmapped.capture()
        except Exception:  # torch raises many types
            vmapped = None
    if vmapped is None:
        before.restore()
    return vmapped


def _try_vmap(worker: WorkerModel, count: int, before: TrialSnapshot) -> VmappedModel | None:
    all_gradients = worker.last_batch_has_all_gradients()
    worker.trial_gradient(0)  # with randomness, since a model may then run other code
    with comparable_gradients(worker.learner.model):
        separate = [worker.trial_gradient(batch) for batch in (0, 1)]
    if not all_gradients or any(grad is None for grads in separate for grad in grads):
        return None
    if before.parameters_changed() or not repeats_itself(worker, [0]):  # vmap would hide both
        return None
    try:
        vmapped = _compute_two_batches(worker, count)
        with comparable_gradients(worker.learner.model):
            again = worker.trial_gradient(0)  # fails if the model has stored a vmapped tensor
    except Exception:  # an operation that vmap does not support; without vmap the same loss has just worked
        return None
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, task_tensors(worker))):
        return None  # The task stored a vmapped tensor, which cannot be used outside vmap.
    rows = [[view[row] for view in vmapped.gradients.views] for row in (0, 1)]
    same = all(map(_are_close, rows, separate)) and _are_close(again, separate[0])
    return vmapped if same else None


def _are_close(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return global_norm([a - b for a, b in pairs]) <= _CLOSE * global_norm([b for _, b in pairs]) + 1e-6


def _compute_two_batches(worker: WorkerModel, count: int) -> VmappedModel:
    """A new model that has computed the first two batches at the newest version."""
    vmapped = VmappedModel(worker, worker.ledger.size(0), count)
    for point, start in zip(vmapped.points.rows, vmapped.start.rows, strict=True):
        point.copy_(worker.learner.flat.buffer)
        start.copy_(worker.buffers.flat.buffer)
    vmapped.compute([0, 1])  # with randomness, only to see that it does not raise
    with comparable_gradients(worker.learner.model):
        vmapped.compute([0, 1])
    return vmapped


class _Slot(GradientMemory):
    """point: the parameters to compute at. numbers: loss and norm; None: not computed yet."""

    def __init__(self, worker: WorkerModel) -> None:
        super().__init__(worker)
        self.point = worker.learner.flat.copy()
        self.numbers: tuple[float, float] | None = None


class VmappedGradients(PooledGradients[_Slot]):
    """As `KeptGradients`, in a few large calls instead of many small ones.

    A ticket has a copy of the version it read. While one of W workers computes, each of the others starts about one
    ticket, so nearly W gradients fit into one call. Tickets that are cancelled before the call are never computed.
    Random numbers (dropout, augmentation) are drawn for all rows at once.

    A single worker whose gradients are applied late (`Delayed`) reads versions that exist long before. Its next
    tickets are computed speculatively, with the ticket that is due. A wrong guess only wastes the computation.
    """

    arithmetic = "vmapped"

    def __init__(self, worker: WorkerModel, policy: Policy, vmapped: VmappedModel) -> None:
        super().__init__(worker, policy, vmapped.samples)
        self._vmapped = vmapped
        self._waiting: dict[int, Ticket] = {}  # started and not yet computed, in the order of their start
        self._speculated: dict[tuple[int, int], _Slot] = {}  # (batch, version) -> computed before the ticket started

    def _new_slot(self) -> _Slot:
        return _Slot(self.worker)

    def _begin(self, ticket: Ticket) -> _Slot:
        slot = self._speculated.pop((ticket.batch, ticket.version), None) or self._slot_reading(ticket.version)
        if slot.numbers is None:  # also if the call that should have computed it failed
            self._waiting[ticket.id] = ticket
        return slot

    def _slot_reading(self, version: int) -> _Slot:
        slot = self._free_slot()
        slot.numbers = None
        newest = self.learner.flat, self.worker.buffers.flat
        flat, buffers = newest if version == self.learner.version else self._old[version]
        slot.point.buffer.copy_(flat.buffer)
        slot.read_buffers.buffer.copy_(buffers.buffer)
        return slot

    def _due(self, ticket: Ticket, slot: _Slot) -> GradientFacts:
        if slot.numbers is None:
            self._compute_with(ticket)
            assert slot.numbers is not None
        return GradientFacts(*slot.numbers, slot.point)

    def _compute_with(self, ticket: Ticket) -> None:
        """Compute this ticket, and as many waiting and speculated tickets as there are rows."""
        vmapped = self._vmapped
        others = [other for other in self._waiting.values() if other is not ticket]
        chosen = [ticket, *others[: vmapped.count - 1]]
        self._speculate(ticket, vmapped.count - len(chosen))
        batches = [*(one.batch for one in chosen), *(batch for batch, _ in self._speculated)]
        slots = [*(self._slots[one.id] for one in chosen), *self._speculated.values()]
        _copy(vmapped.points.rows, [slot.point.buffer for slot in slots])
        _copy(vmapped.start.rows, [slot.read_buffers.buffer for slot in slots])
        try:
            vmapped.compute(batches)
        except Exception:  # for example, collate left out a sample; an error in the loss is raised again below
            self._compute_alone(ticket)
            return
        _copy([slot.gradient.buffer for slot in slots], vmapped.gradients.rows)
        _copy([slot.after_buffers.buffer for slot in slots], vmapped.after.rows)
        for slot, (loss, norm) in zip(slots, vmapped.numbers.tolist(), strict=False):
            slot.numbers = loss, norm
        for one in chosen:
            del self._waiting[one.id]

    def _compute_alone(self, ticket: Ticket) -> None:
        """Compute this ticket without vmap, because the data of this or another ticket does not allow it."""
        slot, learner, buffers = self._slots[ticket.id], self.learner, self.worker.buffers
        learner.point_at(slot.point)
        buffers.load(slot.read_buffers.views)
        try:
            loss = self.worker.backward([ticket.batch]).item()
            buffers.save(slot.after_buffers.views)
        finally:
            learner.point_at(learner.flat)
            buffers.reset()
        for view, parameter in zip(slot.gradient.views, learner.params, strict=True):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        learner.clear_gradients()
        slot.numbers = loss, global_norm([slot.vector])
        del self._waiting[ticket.id]

    def _speculate(self, ticket: Ticket, most: int) -> None:
        """Fill slots for the tickets that will probably follow this one and whose versions exist already."""
        self._free += self._speculated.values()  # wrong guesses of the last call
        self._speculated.clear()
        if not self._history or len(self._slots) > 1:
            return
        for ahead in range(1, most + 1):
            batch, version = ticket.batch + ahead, ticket.version + ahead
            exists = version == self.learner.version or version in self._old
            if not exists or self.worker.ledger.size(batch) != self._samples:
                break
            self._speculated[batch, version] = self._slot_reading(version)

    def _release(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket.id, None)
        super()._release(ticket)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy the first tensors, as many as both lists have."""
    count = min(len(targets), len(sources))
    if targets[0].numel():
        torch._foreach_copy_(targets[:count], sources[:count])
