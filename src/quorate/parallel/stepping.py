"""Puts a step of ours in the place of the user's `optimizer.step`, for schedulers, scalers and loops alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from quorate.errors import BadInput

#: Calls the closure several times in one step, each time expecting the parameters to have moved.
_SEVERAL_CLOSURES = ("LBFGS",)


def check_makes_one_gradient_a_step(optimizer: Optimizer) -> None:
    if type(optimizer).__name__ in _SEVERAL_CLOSURES:
        raise BadInput(f"{type(optimizer).__name__} computes several gradients in one step; use another optimizer")


class Takeover:
    """While it holds, `optimizer.step()` calls `step` and returns what that gives.

    settled: waits until the parameters are those that the step leads to; called before anybody may look at them.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any], settled: Callable[[], None]) -> None:
        self._optimizer, self._before = optimizer, optimizer.__dict__.get("step")

        def stepping(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
            for before in chain(_global_optimizer_pre_hooks.values(), self._optimizer_step_pre_hooks.values()):
                before(self, args, kwargs)
            if closure is not None:
                with torch.enable_grad():
                    closure()
            outcome = step()
            after = [*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
            if after:
                settled()
            for one in after:
                one(self, args, kwargs)
            return outcome

        # A scheduler that was made before us has marked the step it saw; one that comes later wraps ours.
        if hasattr(self._before, "_wrapped_by_lr_sched"):
            stepping._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(stepping, optimizer)  # type: ignore[method-assign]
        # Fused optimizers unscale inside their step, which a scaler asks for by attributes that are gone again when the
        # update is made. So the scaler does it before, as with any other optimizer.
        self._unscales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if self._unscales:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: settled()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: settled()),
        ]

    def give_back(self) -> None:
        """Let the optimizer step as it did."""
        for handle in self._handles:
            handle.remove()
        if self._unscales:
            self._optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if self._before is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._before  # type: ignore[method-assign]
