"""The user's optimizer, applied to a few parameters at a time.

An update arrives bucket by bucket, while the user's thread may already set the next learning rate, clear `.grad` or run
forward. The optimizer's arithmetic therefore runs on *aliases*: tensors that share a parameter's memory and optimizer
state but have a `.grad` of their own. It uses the hyperparameters that held when `step()` was called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quorate.errors import BadInput

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
