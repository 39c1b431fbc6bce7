"""The user's optimizer, applied to a few parameters at a time.

An update arrives bucket by bucket, while the user's thread may already be setting the next learning rate, clearing
`.grad` or running forward. So the arithmetic runs on *twins*: tensors that share a parameter's memory and its optimizer
state but have a `.grad` of their own, with the hyperparameters that held when `step()` was called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quorate.errors import BadInput

#: By parameter group, everything but the parameters.
Hyper = list[dict[str, Any]]


class PartialSteps:
    """Steps an optimizer for some of its parameters, from any thread."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # An optimizer of the same class that has whatever the user's has, but its own parameter groups.
        self._shell: Optimizer = object.__new__(type(optimizer))
        step = type(optimizer).step
        # Without the hooks around it: they are the user's, and run once a step, not once a bucket.
        self._step: Callable[..., Any] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        self._group_of = {
            parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._twins: dict[Tensor, Tensor] = {}

    def hyper(self) -> Hyper:
        """The hyperparameters as they are now."""
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
        """Update these parameters.

        instead: other tensors to update in their place, by parameter; the optimizer's state is the same.
        """
        optimizer, shell = self._optimizer, self._shell
        shell.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
        groups: dict[int, list[Tensor]] = {}
        state: dict[Tensor, Any] = {}
        for parameter, gradient in gradients.items():
            number = self._group_of.get(parameter)
            if number is None:
                continue  # the optimizer does not know it
            twin = self._twin(parameter) if instead is None else instead[parameter]
            twin.grad = gradient
            state[twin] = optimizer.state[parameter]
            groups.setdefault(number, []).append(twin)
        shell.param_groups = [{**hyper[number], "params": twins} for number, twins in groups.items()]
        shell.state = state  # type: ignore[assignment]
        try:
            with torch.no_grad():
                self._step(shell)
            self._check_groups(hyper, list(groups))
        finally:
            for twins in groups.values():
                for twin in twins:
                    twin.grad = None

    def _check_groups(self, hyper: Hyper, numbers: list[int]) -> None:
        """Refuse an optimizer that keeps its progress in its groups: it would count every bucket as a step."""
        for number, group in zip(numbers, self._shell.param_groups, strict=True):
            changed = [key for key in group if key != "params" and group[key] is not hyper[number].get(key)]
            if changed:
                raise BadInput(
                    f"{type(self._optimizer).__name__} changes {changed[0]!r} of its parameter groups in step(), which "
                    "cannot be done for a part of the parameters; use an optimizer that keeps its state by parameter"
                )

    def _twin(self, parameter: Tensor) -> Tensor:
        twin = self._twins.get(parameter)
        if twin is None or twin.data_ptr() != parameter.data_ptr():
            twin = self._twins[parameter] = parameter.detach()
        return twin
