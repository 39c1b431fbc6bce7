"""The parameters as one flat vector, so that an elementwise optimizer needs a few calls instead of hundreds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quorate.flat import Flat
from quorate.learner import Learner

#: Optimizers with elementwise steps, which do not depend on the tensor that an element is in.
_ELEMENTWISE = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam, torch.optim.AdamW)


class FlatOptimizer:
    """Gives the learner's optimizer one flat vector in place of its parameters.

    gradient: the flat gradient of the next step; None: it is gathered from the parameters' `.grad`.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._vector = nn.Parameter(vector_of(learner.flat))
        self._gathered = Flat(learner.flat.layout, learner.flat.buffer.device)
        self._whole = vector_of(self._gathered)
        self.gradient: Tensor | None = None
        learner.optimizer.param_groups[0]["params"] = [self._vector]
        learner.before_step = self._before_step

    def _before_step(self) -> None:
        self._vector.grad, self.gradient = self.gradient, None
        if self._vector.grad is None:
            grads = self._learner.gradients()
            assert len(grads) == len(self._gathered.views), "every parameter had a gradient when this was made"
            torch._foreach_copy_(self._gathered.views, grads)
            self._vector.grad = self._whole


def vector_of(flat: Flat) -> Tensor:
    """All tensors, which have one dtype, as one vector. It includes the padding, which is zero."""
    (vector,) = flat.layout.runs(flat.buffer)
    return vector


def flatten_optimizer(learner: Learner) -> FlatOptimizer | None:
    """Flatten an optimizer before its first step; None where flattening would change its steps.

    Every parameter must have a gradient in every step.
    """
    optimizer = learner.optimizer
    groups = optimizer.param_groups
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if type(optimizer) not in _ELEMENTWISE or len(groups) != 1 or hooked or optimizer.state:
        return None
    # Compared as sets: the buffer fixes the place of each parameter, so their order does not matter.
    if set(groups[0]["params"]) != set(learner.params) or len(learner.flat.layout.runs(learner.flat.buffer)) != 1:
        return None
    return FlatOptimizer(learner)
