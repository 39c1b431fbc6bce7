"""The parameters as one long vector, for an optimizer that treats all elements alike: a few calls, not hundreds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quorate.flat import Flat
from quorate.learner import Learner

#: Their steps go element by element: nothing depends on which tensor an element is in.
_BY_ELEMENT = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam, torch.optim.AdamW)


class OneVector:
    """What the optimizer sees in place of a learner's parameters.

    gradient: the next step's, where it lies in one piece; None: it is gathered from the parameters' `.grad`.
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
    """All tensors of one type as one; what pads them is part of it, and zero."""
    (vector,) = flat.layout.runs(flat.buffer)
    return vector


def as_one_vector(learner: Learner) -> OneVector | None:
    """Before the first step, and where every parameter has a gradient in each; None where that could be seen."""
    optimizer = learner.optimizer
    groups = optimizer.param_groups
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if type(optimizer) not in _BY_ELEMENT or len(groups) != 1 or hooked or optimizer.state:
        return None
    # In any order, since each has its place in the buffer.
    if set(groups[0]["params"]) != set(learner.params) or len(learner.flat.layout.runs(learner.flat.buffer)) != 1:
        return None
    return OneVector(learner)
