"""A worker's forward and backward pass: the gradient of a batch at a version.

Autograd allocates a new tensor for every gradient. For a big layer the system maps and zeroes fresh pages each time,
which costs three times the matrix product itself, before anything is copied into shared memory. `DirectLinears`
writes the product directly into the worker's block, with the call that autograd would make, so the bits are the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quorate.engines.shared.buffers import BufferSlots
from quorate.engines.shared.shared_memory import BlockLayout
from quorate.errors import BadInput
from quorate.flat import Layout
from quorate.learner import all_finite
from quorate.task import BoundTask

#: Smaller weights are faster with autograd's own tensor and one copy.
WORTH_IT_ELEMENTS = 1 << 17


def checked_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise BadInput(f"device {device!r} is not known to torch; write e.g. cpu, cuda or cuda:0") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device {str(device)!r} was asked for, but torch sees no GPU here; use cpu")
    if found.type not in ("cpu", "cuda"):
        raise BadInput(f"device {str(device)!r} is not one that runs are made on; use cpu or cuda")
    return found


def check_dense(grads: Sequence[Tensor]) -> None:
    if any(grad.is_sparse for grad in grads):
        raise BadInput("the model gives sparse gradients, which cannot be averaged here; use sparse=False")


class DirectLinears:
    """Linear layers that write the gradient of their weight into a block, between `begin_backward` and `end`.

    A layer is identified by the position of its weight in `params`; layers of other weights stay as they are.
    """

    def __init__(self, model: nn.Module, params: list[nn.Parameter], check: Callable[[], None]) -> None:
        uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
        places = {id(parameter): place for place, parameter in enumerate(params)}
        self._check, self.params = check, params
        self.written: set[int] = set()  # weights whose gradient is in the block
        self.uses: Counter[int] = Counter()  # calls of each layer since `begin_forward`
        self._views: list[Tensor] | None = None
        for module in model.modules():
            weight = module._parameters.get("weight")
            if (
                type(module) is nn.Linear
                and "forward" not in vars(module)  # the user has replaced it
                and weight is not None
                and weight.numel() >= WORTH_IT_ELEMENTS
                and weight.is_contiguous()
                and id(weight) in places
                and uses[id(weight)] == 1
                and not weight._backward_hooks
                and not getattr(weight, "_post_accumulate_grad_hooks", None)
            ):
                module.forward = partial(_forward, self, places[id(weight)], module)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: Any) -> DirectLinears:
        return self  # `_forward` recognises that the weights of a copied model are not in `params`

    def begin_forward(self) -> None:
        self.uses.clear()
        self.written.clear()

    def begin_backward(self, views: list[Tensor]) -> None:
        """The next backward pass computes the worker's gradient; `views` are the tensors to write it to."""
        self._views = views

    def end(self) -> None:
        self._views = None

    def put(self, place: int, grad: Tensor, x: Tensor) -> bool:
        """Write gradᵀ·x if the layer was called once; False if autograd must compute the gradient."""
        self._check()
        # Without views, or with gradients enabled, the loss function itself calls autograd. If a layer is called
        # twice, autograd sums the gradients, in its own order.
        if self._views is None or torch.is_grad_enabled() or self.uses[place] > 1:
            return False
        torch.mm(grad.t(), x, out=self._views[place])
        self.written.add(place)
        return True


def _forward(direct: DirectLinears, place: int, module: nn.Linear, input: Tensor) -> Tensor:
    weight = module.weight  # the parameter itself, or a copy of it, or a tensor that the user computed from it
    if torch.is_grad_enabled() and weight.requires_grad and weight is direct.params[place]:
        direct.uses[place] += 1
        if _is_plain(input, weight):
            result: Tensor = _Linear.apply(input, weight, module.bias, direct, place)  # type: ignore[no-untyped-call]
            return result
    return functional.linear(input, weight, module.bias)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd would compute exactly the product that `_Linear` computes."""
    return (
        x.dim() == 2
        and x.is_contiguous()
        and x.dtype == weight.dtype
        and not weight._backward_hooks
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # inside vmap, grad and the like
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, direct: DirectLinears, place: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.direct, ctx.place = direct, place
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad: Tensor = grads[0]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        for_weight = None
        if wants_weight and not ctx.direct.put(ctx.place, grad, x):
            for_weight = grad.t().mm(x)
        return grad.mm(weight) if wants_x else None, for_weight, grad.sum(0) if wants_bias else None, None, None


#: A model whose forward and backward take longer than this checks between layers whether its ticket was cancelled.
LOOK_AFTER_S = 0.003


class Cancelled(Exception):  # noqa: N818 - nothing went wrong
    """The ticket was cancelled; the worker abandons it."""


class GradientResult(NamedTuple):
    loss: float
    finite: bool
    some_missing: bool


class TensorPlace:
    """Memory that holds a version or a gradient: one block, or one block of each shard.

    lasting: the memory will be used again, so pinning it for a GPU pays off.
    """

    def __init__(self, pieces: Sequence[tuple[BlockLayout, Tensor]], *, gradient: bool, lasting: bool = True) -> None:
        self.memories, self.lasting = [memory for _, memory in pieces], lasting
        self.wholes: list[Tensor] = []  # blocks without buffers and masks
        self.views: list[Tensor] = []
        self.runs: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self._masks: list[Tensor] = []
        for layout, memory in pieces:
            inside = layout.gradient if gradient else layout.params
            whole = layout.gradient_of(memory) if gradient else layout.params_of(memory)
            self.wholes.append(whole)
            self.views += inside.views(whole)
            self.runs += inside.runs(whole)
            self.buffers += layout.buffers.views(layout.buffers_of(memory))
            self._masks.append(layout.mask_of(memory))

    def mark_absent(self, absent: Sequence[int]) -> None:
        """Mark these parameters, by number, as having no gradient; all others have one."""
        first = 0
        for mask in self._masks:
            mask.fill_(1)
            for number in absent:
                if first <= number < first + len(mask):
                    mask[number - first] = 0
            first += len(mask)


class Computer:
    """The model of one worker. On the CPU it owns no parameters: they point into the block of a version."""

    def __init__(
        self,
        task: BoundTask,
        *,
        seed: int,
        device: torch.device,
        wire: str,
        look_through: bool,
        check: Callable[[], None],
        cut: Sequence[slice] = (slice(None),),
    ) -> None:
        self._task = task
        self._look_through = look_through
        self._check = check
        self.model = task.model(seed, device)
        self.model.train()
        self.params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._buffers = BufferSlots(self.model)
        self.layouts = [BlockLayout(self.model, wire, part) for part in cut]
        self._on_gpu = device.type == "cuda"
        same_memory = not self._on_gpu and wire == "fp32"  # else a gradient is transferred or converted
        self._direct = DirectLinears(self.model, self.params if same_memory else [], check)
        self._pinned: set[int] = set()  # addresses
        self._looking_at: Hashable = None
        self._hooks: list[Any] = []
        self._seen_dense = False
        self._staging = _Staging(self.layouts, device) if self._on_gpu else None
        if self._staging is not None:
            for parameter, view in zip(self.params, self._staging.params, strict=True):
                parameter.data = view

    def look_at(self, place: TensorPlace, version: Hashable) -> None:
        """Use the parameters and buffers at this place from now on; `version` identifies the parameters."""
        self._pin(place)
        if self._looking_at != version:
            self._looking_at = version
            if self._staging is not None:
                for mine, theirs in zip(self._staging.whole_params, place.wholes, strict=True):
                    mine.copy_(theirs, non_blocking=True)
            else:
                for parameter, view in zip(self.params, place.views, strict=True):
                    parameter.data = view
        for mine, theirs in zip(self._buffers.tensors(), place.buffers, strict=True):  # the last forward changed them
            mine.copy_(theirs)

    def _pin(self, place: TensorPlace) -> None:
        """Pin this memory, so that the GPU reads and writes it directly."""
        if not self._on_gpu or not place.lasting:
            return
        for memory in place.memories:
            if memory.data_ptr() not in self._pinned:
                self._pinned.add(memory.data_ptr())
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    def forget_memory(self) -> None:
        """Unpin all memory: it may be unmapped, and other memory may be mapped at the same addresses."""
        self._looking_at = None
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()

    def compute(self, batch: Any, place: TensorPlace, on_backward: Callable[[], None]) -> GradientResult:
        """Forward and backward; write the gradient and the changed buffers to this place."""
        self._pin(place)
        started = perf_counter()
        self._direct.begin_forward()
        try:
            loss = self._task.loss(self.model, batch)
            on_backward()
            self._direct.begin_backward(place.views)
            loss.backward()  # type: ignore[no-untyped-call]
            missing = self._write(place)
            for mine, theirs in zip(self._buffers.tensors(), place.buffers, strict=True):
                theirs.copy_(mine, non_blocking=True)
            value = loss.item()
        finally:
            for parameter in self.params:
                parameter.grad = None
            self._direct.end()
        if self._on_gpu:
            torch.cuda.synchronize()
        if not self._hooks and perf_counter() - started > LOOK_AFTER_S:
            self._look_between_layers()
        finite = math.isfinite(value) and (not self._look_through or all_finite(place.runs))
        return GradientResult(value, finite, missing)

    def _write(self, place: TensorPlace) -> bool:
        """Copy the gradients that autograd allocated; True if some parameters have no gradient."""
        grads = [parameter.grad for parameter in self.params]
        if not self._seen_dense:
            self._seen_dense = True
            check_dense([grad for grad in grads if grad is not None])
        written = self._direct.written
        targets = place.views if self._staging is None else self._staging.gradient
        there, here, absent = [], [], []
        for number, grad in enumerate(grads):
            if grad is None:
                if number not in written:
                    absent.append(number)
            elif number in written:  # the weight is also used outside its layer
                place.views[number].add_(grad)
            else:
                there.append(targets[number])
                here.append(grad)
        if there:
            torch._foreach_copy_(there, here)
        if absent:
            place.mark_absent(absent)
            for number in absent:
                targets[number].zero_()
        if self._staging is not None:
            for theirs, mine in zip(place.wholes, self._staging.whole_gradient, strict=True):
                theirs.copy_(mine, non_blocking=True)
        return bool(absent)

    def _look_between_layers(self) -> None:
        """Check before every layer, in the forward and the backward pass, whether the ticket was cancelled."""

        def before(*_: Any) -> None:
            self._check()

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(before)  # type: ignore[no-untyped-call]

        for module in self.model.modules():
            if next(module.children(), None) is None:
                self._hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


class _Staging:
    """Parameters and gradient on the GPU, in one piece per shard, so that each shard is transferred in one copy."""

    def __init__(self, layouts: Sequence[BlockLayout], device: torch.device) -> None:
        self.whole_params, self.params = _on_device([one.params for one in layouts], device)
        self.whole_gradient, self.gradient = _on_device([one.gradient for one in layouts], device)


def _on_device(layouts: Sequence[Layout], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Memory for each of these layouts, and views of all its tensors."""
    wholes = [torch.zeros(one.nbytes, dtype=torch.uint8, device=device) for one in layouts]
    return wholes, [view for one, whole in zip(layouts, wholes, strict=True) for view in one.views(whole)]
