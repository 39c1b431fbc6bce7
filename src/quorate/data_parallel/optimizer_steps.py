"""The user's optimizer: its `step()` is replaced, and it is applied to a few parameters at a time.

An update arrives bucket by bucket, while the user's thread may already set the next learning rate, clear `.grad` or run
forward. The optimizer's arithmetic therefore runs on *aliases*: tensors that share a parameter's memory and optimizer
state but have a `.grad` of their own. It uses the hyperparameters that held when `step()` was called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from quorate.errors import BadInput

#: Optimizers that call the closure several times in one step and expect moved parameters each time.
_SEVERAL_CLOSURES = ("LBFGS",)
#: For each parameter group, all its options except the parameters.
Hyper = list[dict[str, Any]]


def hyper_as_json(hyper: Hyper) -> Hyper:
    """Hyperparameters for a message: tensors and numpy numbers become Python numbers."""
    return [{key: value.item() if hasattr(value, "item") else value for key, value in group.items()} for group in hyper]


def hyper_from_json(received: Hyper, own: Hyper) -> Hyper:
    """Received hyperparameters; options that JSON cannot carry keep this process's own value."""
    return [{**mine, **theirs} for mine, theirs in zip(own, received, strict=True)]


class PartialSteps:
    """Steps an optimizer for some of its parameters, from any thread."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Shares all attributes with the user's optimizer except the parameter groups and the state.
        self._partial: Optimizer = object.__new__(type(optimizer))
        step = type(optimizer).step
        # Without the user's hooks: they run once a step, not once a bucket.
        self._step: Callable[..., Any] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        self._group_of = {
            parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._aliases: dict[Tensor, Tensor] = {}

    def hyper(self) -> Hyper:
        """The current hyperparameters."""
        parameters = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if parameters != len(self._group_of):
            raise BadInput(
                f"the optimizer had {len(self._group_of)} parameters when the model was wrapped, now {parameters}; "
                "wrap the model when its optimizer is complete"
            )
        return [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def apply(
        self, gradients: Mapping[Tensor, Tensor], hyper: Hyper, instead: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Update the parameters that have a gradient here.

        instead: by parameter, another tensor to update in its place, with the parameter's optimizer state.
        """
        optimizer, partial = self._optimizer, self._partial
        partial.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
        groups: dict[int, list[Tensor]] = {}
        state: dict[Tensor, Any] = {}
        for parameter, gradient in gradients.items():
            number = self._group_of.get(parameter)
            if number is None:
                continue  # The optimizer does not train this parameter.
            target = self._alias(parameter) if instead is None else instead[parameter]
            target.grad = gradient
            state[target] = optimizer.state[parameter]
            groups.setdefault(number, []).append(target)
        partial.param_groups = [{**hyper[number], "params": targets} for number, targets in groups.items()]
        partial.state = state  # type: ignore[assignment]
        try:
            with torch.no_grad():
                self._step(partial)
            self._check_groups(hyper, list(groups))
        finally:
            for targets in groups.values():
                for target in targets:
                    target.grad = None

    def _check_groups(self, hyper: Hyper, numbers: list[int]) -> None:
        """Refuse an optimizer that keeps its progress in its groups: it would count every bucket as a step."""
        for number, group in zip(numbers, self._partial.param_groups, strict=True):
            changed = [key for key in group if key != "params" and group[key] is not hyper[number].get(key)]
            if changed:
                raise BadInput(
                    f"{type(self._optimizer).__name__} changes {changed[0]!r} of its parameter groups in step(), which "
                    "cannot be done for a part of the parameters; use an optimizer that keeps its state by parameter"
                )

    def _alias(self, parameter: Tensor) -> Tensor:
        alias = self._aliases.get(parameter)
        if alias is None or alias.data_ptr() != parameter.data_ptr():
            alias = self._aliases[parameter] = parameter.detach()
        return alias


def check_parameters(named: Sequence[tuple[str, Tensor]], optimizer: Optimizer) -> None:
    if not named:
        raise BadInput("the module has no parameter that needs a gradient; there is nothing to train")
    if not isinstance(optimizer, Optimizer):
        raise BadInput(
            f"optimizer is a {type(optimizer).__name__}; make it before: "
            f"DataParallel(module, torch.optim.SGD(module.parameters(), …), policy)"
        )
    inside = getattr(optimizer, "optimizer", None)
    if isinstance(inside, Optimizer):
        raise BadInput(
            f"optimizer is a {type(optimizer).__name__} around a {type(inside).__name__}; "
            f"give DataParallel the one that is inside, and wrap it afterwards"
        )
    if type(optimizer).__name__ in _SEVERAL_CLOSURES:
        raise BadInput(f"{type(optimizer).__name__} computes several gradients in one step; use another optimizer")
    known = {id(parameter) for _, parameter in named}
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if id(parameter) not in known and parameter.requires_grad:
            raise BadInput(
                "the optimizer has a parameter that is not the module's; "
                "make it of the parameters of the module that DataParallel gets"
            )


class Takeover:
    """Replaces `optimizer.step()` by `step` until `give_back` is called.

    settled: waits until the step's update is applied; called before hooks or state_dict() read the parameters.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any], settled: Callable[[], None]) -> None:
        self._optimizer, self._before = optimizer, optimizer.__dict__.get("step")

        def stepping(self: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]  # Schedulers check this attribute.
            for hook in chain(_global_optimizer_pre_hooks.values(), self._optimizer_step_pre_hooks.values()):
                hook(self, args, kwargs)
            if closure is not None:
                with torch.enable_grad():
                    closure()
            outcome = step()
            after = [*self._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
            if after:
                settled()
            for hook in after:
                hook(self, args, kwargs)
            return outcome

        # A scheduler that was made earlier has marked the original step; a later one wraps this one.
        if hasattr(self._before, "_wrapped_by_lr_sched"):
            stepping._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(stepping, optimizer)  # type: ignore[method-assign]
        # Fused optimizers unscale inside step(), with attributes that the scaler has removed by the time the update is
        # applied. So the scaler must unscale before the step, as with any other optimizer.
        self._unscales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if self._unscales:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: settled()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: settled()),
        ]

    def give_back(self) -> None:
        """Restore the optimizer's own step."""
        for handle in self._handles:
            handle.remove()
        if self._unscales:
            self._optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if self._before is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._before  # type: ignore[method-assign]
