"""`quorate.DataParallel` inside the training loops of other frameworks; each module needs the package of its name.

This file holds the code that they share, which needs none of these packages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from quorate.data_parallel.module import DataParallel


class TrainedModels:
    """The models that a framework trains in this process, in the order of their setup: the same in every process."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[DataParallel]] = []
        self._in_collective = False

    def add(self, model: DataParallel) -> None:
        self._models.append(weakref.ref(model))

    def meet_and_call(self, collective: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function in which all processes take part, after all models have met.

        Under full and delayed sync every process makes the same steps, so only functions that save or load must wait.
        """
        if self._in_collective:  # one collective calls another
            return collective(*arguments, **named)
        always = "save" in collective.__name__ or "load" in collective.__name__
        for model in (reference() for reference in self._models):
            if model is not None and (always or not model.policy.takes_everybody):
                model.meet()
        self._in_collective = True
        try:
            return collective(*arguments, **named)
        finally:
            self._in_collective = False

    def meet_before(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, but all models meet first."""
        return wraps(collective)(lambda *arguments, **named: self.meet_and_call(collective, *arguments, **named))


def inside(model: nn.Module) -> nn.Module:
    """The module inside a `DataParallel`, compiled or not; any other model is returned unchanged."""
    wrapped = getattr(model, "_orig_mod", model)
    return wrapped.module if isinstance(wrapped, DataParallel) else model
