"""Gradients as backward computes them: each one is put on its way, and replaced by what it will become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quorate.engines.collective.free_running import FreeRunning
from quorate.engines.collective.pending import PendingGradient, plain
from quorate.engines.collective.rounds import Round
from quorate.errors import BadInput


class GradientHooks:
    """Hears every gradient of the model while `syncing()`."""

    def __init__(self, plane: FreeRunning, syncing: Callable[[], bool]) -> None:
        self._plane, self._syncing = plane, syncing
        self.weight = 1.0  # what the next gradient counts
        self._round: Round | None = None  # of the backward pass under way
        self._in_backward = False
        self._numbers = {id(parameter): number for number, parameter in enumerate(plane.layout.parameters)}
        self._pending: dict[int, PendingGradient] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._computed)  # type: ignore[no-untyped-call]
            for parameter in plane.layout.parameters
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _computed(self, parameter: Tensor) -> None:
        if not self._syncing():
            return
        if not self._in_backward:
            self._in_backward = True
            self._round = self._plane.begin_backward(self.weight)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)
        if self._round is not None:
            self._send(self._numbers[id(parameter)], parameter)

    def _send(self, member: int, parameter: Tensor) -> None:
        assert self._round is not None and parameter.grad is not None
        gradient = parameter.grad
        if gradient.layout != torch.strided:
            raise BadInput("a parameter has a sparse gradient, which no all-reduce can average; use sparse=False")
        self._plane.put(self._round, member, plain(gradient))
        parameter.grad = self._promise(member, parameter)

    def _promise(self, member: int, parameter: Tensor) -> PendingGradient:
        round = self._round
        assert round is not None
        return PendingGradient(parameter, lambda: self._plane.gradient(round, member))

    def _backward_is_over(self) -> None:
        """What backward did not reach leaves now: gradients from before (`no_sync`), or none."""
        round, self._round, self._in_backward = self._round, None, False
        if round is None:
            return
        self._round = round
        parameters = self._plane.layout.parameters
        for member in round.unfilled():
            if member < len(parameters) and parameters[member].grad is not None:
                self._send(member, parameters[member])
        self._round = None
        self._plane.fill_up(round, lambda member: self._rest(round, member))

    def _rest(self, round: Round, member: int) -> Tensor | None:
        """Buffers go as they are; a parameter that nobody here used has no gradient."""
        count = len(self._plane.layout.parameters)
        if member < count or round.weight == 0:
            return None
        return self._plane.layout.tensor(member)

    def forget(self) -> None:
        """Let go of what was promised: the gradients of this iteration belong to a later update."""
        for parameter in self._plane.layout.parameters:
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad = None


def buffers_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Buffers that are state of the model and can be averaged."""
    return [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if buffer.dtype.is_floating_point or buffer.dtype in (torch.int64, torch.int32)
    ]
