"""A worker's arithmetic: the gradient of a batch at a version, from shared memory into shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quorate.engines._bench import check_dense
from quorate.engines._buffers import BufferSlots
from quorate.engines.local.direct import DirectLinears
from quorate.engines.local.memory import BlockLayout, Blocks
from quorate.errors import BadInput
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


class Computer:
    """The model of one worker. It owns no parameters: it looks at those of the version it is asked for."""

    def __init__(
        self,
        task: BoundTask,
        blocks: Blocks,
        *,
        seed: int,
        device: torch.device,
        wire: str,
        look_through: bool,
        check: Callable[[], None],
    ) -> None:
        self._task, self._blocks = task, blocks
        self._look_through = look_through
        self._check = check
        self.model = task.model(seed, device)
        self.model.train()
        self.params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._buffers = BufferSlots(self.model)
        self.layout = BlockLayout(self.model, wire)
        if self.layout.nbytes != blocks.block_bytes:
            raise BadInput(f"task {task.name}: model() gives another model in a worker than in the main process")
        self._on_gpu = device.type == "cuda"
        writes_itself = not self._on_gpu and wire == "fp32"
        self._direct = DirectLinears(self.model, self.params, check) if writes_itself else None
        self._versions: dict[int, _Place] = {}
        self._gradients: dict[int, _Place] = {}
        self._pinned: set[int] = set()
        self._looking_at: tuple[int, int] | None = None
        self._hooks: list[Any] = []
        self._seen_dense = False
        self._staging = _Staging(self.layout, device) if self._on_gpu else None
        if self._staging is not None:
            for parameter, view in zip(self.params, self._staging.params, strict=True):
                parameter.data = view

    # ------------------------------------------------------------ versions

    def look_at(self, block: int, version: int) -> None:
        """Compute with the parameters and buffers in this block from now on."""
        place = self._versions.get(block)
        if place is None:
            place = self._versions[block] = _Place(self.layout, self._blocks.block(block), gradient=False)
            self._pin(block)
        if self._looking_at != (block, version):
            self._looking_at = block, version
            if self._staging is not None:
                self._staging.whole_params.copy_(place.whole, non_blocking=True)
            else:
                for parameter, view in zip(self.params, place.views, strict=True):
                    parameter.data = view
        for mine, theirs in zip(self._buffers.tensors(), place.buffers, strict=True):  # the last forward changed ours
            mine.copy_(theirs)

    def _pin(self, block: int) -> None:
        """Let the GPU read and write this block itself. It may hold now a version, now a gradient."""
        if self._on_gpu and block not in self._pinned:
            self._pinned.add(block)
            memory = self._blocks.block(block)
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    # ------------------------------------------------------------ gradients

    def compute(self, batch: Any, block: int, on_backward: Callable[[], None]) -> Computed:
        """Forward and backward; the gradient, and what became of the buffers, are then in this block."""
        place = self._gradients.get(block)
        if place is None:
            place = self._gradients[block] = _Place(self.layout, self._blocks.block(block), gradient=True)
            self._pin(block)
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

    def _write(self, place: _Place) -> bool:
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
            place.mask.fill_(1)
            for number in absent:
                targets[number].zero_()
                place.mask[number] = 0
        if self._staging is not None:
            place.whole.copy_(self._staging.whole_gradient, non_blocking=True)
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


class _Place:
    """A block, as parameters or as a gradient."""

    def __init__(self, layout: BlockLayout, block: Tensor, gradient: bool) -> None:
        inside = layout.gradient if gradient else layout.params
        self.whole = layout.gradient_of(block) if gradient else layout.params_of(block)
        self.views = inside.views(self.whole)
        self.runs = inside.runs(self.whole)
        self.buffers = layout.buffers.views(layout.buffers_of(block))
        self.mask = layout.mask_of(block)


class _Staging:
    """Parameters and gradient on the device, each in one piece, so that each crosses over in one copy."""

    def __init__(self, layout: BlockLayout, device: torch.device) -> None:
        self.whole_params = torch.zeros(layout.params.nbytes, dtype=torch.uint8, device=device)
        self.params = layout.params.views(self.whole_params)
        self.whole_gradient = torch.zeros(layout.gradient.nbytes, dtype=torch.uint8, device=device)
        self.gradient = layout.gradient.views(self.whole_gradient)
