"""A worker's arithmetic: the gradient of a batch at a version, from memory that others wrote into memory they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quorate.engines._bench import check_dense
from quorate.engines._buffers import BufferSlots
from quorate.engines.processes.direct import DirectLinears
from quorate.engines.processes.memory import BlockLayout
from quorate.learner import all_finite
from quorate.task import BoundTask

#: Work that takes longer than this looks between its layers whether it was cancelled.
LOOK_AFTER_S = 0.003


class Cancelled(Exception):  # noqa: N818 - nothing went wrong
    """The ticket is over; the work is abandoned where it stands."""


class Computed(NamedTuple):
    loss: float
    finite: bool
    some_missing: bool


class Place:
    """Memory that holds a version or a gradient: one block, or where the model is cut into shards, one of each.

    lasting: the same memory will come again, so that it is worth letting a GPU know it.
    """

    def __init__(self, pieces: Sequence[tuple[BlockLayout, Tensor]], *, gradient: bool, lasting: bool = True) -> None:
        self.memories, self.lasting = [memory for _, memory in pieces], lasting
        self.wholes: list[Tensor] = []  # without buffers and masks
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
        """Say which parameters have no gradient, by number; all others have one."""
        first = 0
        for mask in self._masks:
            mask.fill_(1)
            for number in absent:
                if first <= number < first + len(mask):
                    mask[number - first] = 0
            first += len(mask)


class Computer:
    """The model of one worker. It owns no parameters: it looks at those of the version it is asked for."""

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
        writes_itself = not self._on_gpu and wire == "fp32"
        self._direct = DirectLinears(self.model, self.params, check) if writes_itself else None
        self._pinned: set[int] = set()  # addresses of memory
        self._looking_at: Hashable = None
        self._hooks: list[Any] = []
        self._seen_dense = False
        self._staging = _Staging(self.layouts, device) if self._on_gpu else None
        if self._staging is not None:
            for parameter, view in zip(self.params, self._staging.params, strict=True):
                parameter.data = view

    # ------------------------------------------------------------ versions

    def look_at(self, place: Place, version: Hashable) -> None:
        """Compute with the parameters and buffers there from now on; `version` is another when they are others."""
        self._pin(place)
        if self._looking_at != version:
            self._looking_at = version
            if self._staging is not None:
                for mine, theirs in zip(self._staging.whole_params, place.wholes, strict=True):
                    mine.copy_(theirs, non_blocking=True)
            else:
                for parameter, view in zip(self.params, place.views, strict=True):
                    parameter.data = view
        for mine, theirs in zip(self._buffers.tensors(), place.buffers, strict=True):  # the last forward changed ours
            mine.copy_(theirs)

    def _pin(self, place: Place) -> None:
        """Let the GPU read and write this memory itself. It may hold now a version, now a gradient."""
        if not self._on_gpu or not place.lasting:
            return
        for memory in place.memories:
            if memory.data_ptr() not in self._pinned:
                self._pinned.add(memory.data_ptr())
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    def forget_memory(self) -> None:
        """What was looked at so far may be unmapped; a GPU must not take what comes there next for it."""
        self._looking_at = None
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()

    # ------------------------------------------------------------ gradients

    def compute(self, batch: Any, place: Place, on_backward: Callable[[], None]) -> Computed:
        """Forward and backward; the gradient, and what became of the buffers, are then in this place."""
        self._pin(place)
        started = perf_counter()
        direct = self._direct
        if direct is not None:
            direct.begin_forward()
        try:
            loss = self._task.loss(self.model, batch)
            on_backward()
            if direct is not None:
                direct.begin_backward(place.views)
            loss.backward()  # type: ignore[no-untyped-call]
            missing = self._write(place)
            for mine, theirs in zip(self._buffers.tensors(), place.buffers, strict=True):
                theirs.copy_(mine, non_blocking=True)
            value = loss.item()
        finally:
            for parameter in self.params:
                parameter.grad = None
            if direct is not None:
                direct.end()
        if self._on_gpu:
            torch.cuda.synchronize()
        if not self._hooks and perf_counter() - started > LOOK_AFTER_S:
            self._look_between_layers()
        finite = math.isfinite(value) and (not self._look_through or all_finite(place.runs))
        return Computed(value, finite, missing)

    def _write(self, place: Place) -> bool:
        """Copy what autograd kept for itself; True if the loss did not reach every parameter."""
        grads = [parameter.grad for parameter in self.params]
        if not self._seen_dense:
            self._seen_dense = True
            check_dense([grad for grad in grads if grad is not None])
        written = set() if self._direct is None else self._direct.written
        targets = place.views if self._staging is None else self._staging.gradient
        there, here, absent = [], [], []
        for number, grad in enumerate(grads):
            if grad is None:
                if number not in written:
                    absent.append(number)
            elif number in written:  # the weight was also used outside of its layer
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

    # ------------------------------------------------------------ cancelling

    def _look_between_layers(self) -> None:
        """Ask before every layer, on the way forward and on the way back, whether the work is still wanted."""
        check = self._check

        def before(_module: nn.Module, _inputs: Any) -> None:
            check()

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(back)  # type: ignore[no-untyped-call]

        def back(_grad: Tensor) -> None:
            check()

        for module in self.model.modules():
            if next(module.children(), None) is None:
                self._hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


class _Staging:
    """Parameters and gradient on the device, each in one piece a shard, so that each crosses over in one copy."""

    def __init__(self, layouts: Sequence[BlockLayout], device: torch.device) -> None:
        params, gradients = [one.params for one in layouts], [one.gradient for one in layouts]
        self.whole_params = [torch.zeros(one.nbytes, dtype=torch.uint8, device=device) for one in params]
        self.params = [view for one, whole in zip(params, self.whole_params, strict=True) for view in one.views(whole)]
        self.whole_gradient = [torch.zeros(one.nbytes, dtype=torch.uint8, device=device) for one in gradients]
        self.gradient = [
            view for one, whole in zip(gradients, self.whole_gradient, strict=True) for view in one.views(whole)
        ]
