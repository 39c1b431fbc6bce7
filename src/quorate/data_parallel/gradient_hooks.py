"""Hooks that send each gradient as soon as backward has computed it, and leave a pending average in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quorate.data_parallel.full_sync import FullSyncPlane
from quorate.data_parallel.lazy_tensors import PendingGradient, plain
from quorate.data_parallel.plane import Round
from quorate.errors import BadInput, QuorateError


class GradientHooks:
    """Receives every gradient of the model while `syncing()`; `weight()` is the weight of a backward pass."""

    def __init__(self, plane: FullSyncPlane, syncing: Callable[[], bool], weight: Callable[[], float]) -> None:
        self._plane, self._syncing, self._weight = plane, syncing, weight
        self._round: Round | None = None  # round of the current backward pass
        self._in_backward = False
        self._numbers = {id(parameter): number for number, parameter in enumerate(plane.layout.parameters)}
        self._absent: dict[int, _Average] = {}  # by parameter number, where this process computed no gradient
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._computed)  # type: ignore[no-untyped-call]
            for parameter in plane.layout.parameters
        ]

    def check_is_whole(self) -> None:
        """Refuse to go on after an interrupted backward pass: other processes have received parts of it."""
        if self._in_backward:
            raise QuorateError(
                "the last backward pass broke off in the middle, when other processes had received some of its "
                "gradients: no update can be made of it; let the error end the script, and start from a checkpoint"
            )

    def settle(self) -> None:
        """Replace pending gradients by copies of the averages, whose buffers are reused after this."""
        for member, parameter in enumerate(self._plane.layout.parameters):
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad = parameter.grad.settled().clone() if self._has_gradient(member) else None
        self._absent = {}

    def forget(self) -> None:
        """Clear pending gradients, because the gradients of this iteration belong to a later update."""
        for parameter in self._plane.layout.parameters:
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.forget()
        self._syncing, self._weight = lambda: False, lambda: 0.0

    def _computed(self, parameter: Tensor) -> None:
        if not self._syncing():
            return
        if not self._in_backward:
            self._in_backward = True
            # A pending gradient here means no step since the last pass: autograd has added this pass to its average.
            self._round = self._plane.begin_backward(self._weight(), isinstance(parameter.grad, PendingGradient))
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)
        if self._round is not None:
            self._send(self._round, self._numbers[id(parameter)], parameter)

    def _send(self, round: Round, member: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise BadInput("a parameter has a sparse gradient, which no all-reduce can average; use sparse=False")
        self._plane.put(round, member, plain(parameter.grad))
        parameter.grad = PendingGradient(parameter, _Average(self._plane, round, member).settle)

    def _backward_is_over(self) -> None:
        """Complete the round: parameters that backward did not reach send an earlier gradient (`no_sync`) or none."""
        round, self._round, self._in_backward = self._round, None, False
        if round is None:
            return
        parameters = self._plane.layout.parameters
        absent: dict[int, _Average] = {}
        for member in round.unfilled():
            if member >= len(parameters):
                continue
            if self._has_gradient(member):
                self._send(round, member, parameters[member])
            else:  # Another process may have a gradient, and clipping must see the same gradients in all processes.
                absent[member] = _Average(self._plane, round, member)
                parameters[member].grad = PendingGradient(parameters[member], absent[member].settle)
        self._absent = absent
        self._plane.fill_up(round, lambda member: self._rest(round, member))

    def _has_gradient(self, member: int) -> bool:
        gradient = self._plane.layout.parameters[member].grad
        if isinstance(gradient, PendingGradient) and member in self._absent:
            return not self._absent[member].is_nothing
        return gradient is not None

    def _rest(self, round: Round, member: int) -> Tensor | None:
        """The value to send for a buffer; None for a parameter that this process did not use."""
        if member < len(self._plane.layout.parameters) or round.weight == 0:
            return None
        return self._plane.buffer_to_send(round, member)


class _Average:
    """The future average of a gradient, or zeros if no process computed that gradient."""

    def __init__(self, plane: FullSyncPlane, round: Round, member: int) -> None:
        self._plane, self._round, self._member = plane, round, member
        self._zeros: Tensor | None = None

    def settle(self) -> Tensor:
        average = self._plane.gradient(self._round, self._member)
        if average is not None:
            return average
        if self._zeros is None:  # Always the same tensor: a later backward may add to it.
            self._zeros = torch.zeros_like(self._plane.layout.tensor(self._member))
        return self._zeros

    @property
    def is_nothing(self) -> bool:
        """Whether no process computed a gradient in the finished round, and no later pass added one."""
        if self._plane.gradient(self._round, self._member) is not None:
            return False
        return self._zeros is None or not bool(self._zeros.any())


def buffers_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Buffers that are state of the model and can be averaged."""
    return [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if buffer.dtype.is_floating_point or buffer.dtype in (torch.int64, torch.int32)
    ]
