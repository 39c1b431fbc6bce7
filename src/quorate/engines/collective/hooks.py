"""Gradients as backward computes them: each one is put on its way, and replaced by what it will become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quorate.engines.collective.free_running import FreeRunning
from quorate.engines.collective.pending import PendingGradient, plain
from quorate.engines.collective.rounds import Round
from quorate.errors import BadInput, QuorateError


class GradientHooks:
    """Hears every gradient of the model while `syncing()`; `weight()`: what those of a backward pass count."""

    def __init__(self, plane: FreeRunning, syncing: Callable[[], bool], weight: Callable[[], float]) -> None:
        self._plane, self._syncing, self._weight = plane, syncing, weight
        self._round: Round | None = None  # of the backward pass under way
        self._in_backward = False
        self._numbers = {id(parameter): number for number, parameter in enumerate(plane.layout.parameters)}
        self._absent: dict[int, _Becoming] = {}  # by number, of those that this process did not compute
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._computed)  # type: ignore[no-untyped-call]
            for parameter in plane.layout.parameters
        ]

    def check_is_whole(self) -> None:
        """Refuse to go on after a backward pass that broke off: the others have parts of it already."""
        if self._in_backward:
            raise QuorateError(
                "the last backward pass broke off in the middle, when other processes had received some of its "
                "gradients: no update can be made of it; let the error end the script, and start from a checkpoint"
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _computed(self, parameter: Tensor) -> None:
        if not self._syncing():
            return
        if not self._in_backward:
            self._in_backward = True
            # A gradient that was added to what the pass before gave, without a step between, holds that already.
            self._round = self._plane.begin_backward(self._weight(), isinstance(parameter.grad, PendingGradient))
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)
        if self._round is not None:
            self._send(self._numbers[id(parameter)], parameter)

    def _send(self, member: int, parameter: Tensor) -> None:
        assert self._round is not None and parameter.grad is not None
        gradient = parameter.grad
        if gradient.layout != torch.strided:
            raise BadInput("a parameter has a sparse gradient, which no all-reduce can average; use sparse=False")
        self._plane.put(self._round, member, plain(gradient))
        parameter.grad = PendingGradient(parameter, _Becoming(self._plane, self._round, member).settle)

    def _backward_is_over(self) -> None:
        """What backward did not reach leaves now: gradients from before (`no_sync`), or none."""
        round, self._round, self._in_backward = self._round, None, False
        if round is None:
            return
        self._round = round
        parameters = self._plane.layout.parameters
        absent: dict[int, _Becoming] = {}
        for member in round.unfilled():
            if member >= len(parameters):
                continue
            if self._has_gradient(member):
                self._send(member, parameters[member])
            else:  # others may have one, and whoever clips must see the same gradients everywhere
                absent[member] = _Becoming(self._plane, round, member)
                parameters[member].grad = PendingGradient(parameters[member], absent[member].settle)
        self._round, self._absent = None, absent
        self._plane.fill_up(round, lambda member: self._rest(round, member))

    def _has_gradient(self, member: int) -> bool:
        gradient = self._plane.layout.parameters[member].grad
        if isinstance(gradient, PendingGradient) and member in self._absent:
            return not self._absent[member].is_nothing
        return gradient is not None

    def _rest(self, round: Round, member: int) -> Tensor | None:
        """Buffers go as they are; a parameter that nobody here used has no gradient."""
        count = len(self._plane.layout.parameters)
        if member < count or round.weight == 0:
            return None
        return self._plane.buffer_to_send(round, member)

    def forget(self) -> None:
        """Let go of what was promised: the gradients of this iteration belong to a later update."""
        for parameter in self._plane.layout.parameters:
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad = None


class _Becoming:
    """What becomes of a gradient: the average, or zeros where nobody computed one."""

    def __init__(self, plane: FreeRunning, round: Round, member: int) -> None:
        self._plane, self._round, self._member = plane, round, member
        self._zeros: Tensor | None = None

    def settle(self) -> Tensor:
        average = self._plane.gradient(self._round, self._member)
        if average is not None:
            return average
        if self._zeros is None:  # one and the same: a later backward may add to it
            self._zeros = torch.zeros_like(self._plane.layout.tensor(self._member))
        return self._zeros

    @property
    def is_nothing(self) -> bool:
        """Whether nobody computed one, and nothing was added to it since; of a round that is over."""
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
