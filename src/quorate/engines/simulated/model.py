"""The model that all simulated workers share, and the interface of the strategies that compute with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quorate.engines.base import Job, Outcome
from quorate.engines.shared.batches import Batches
from quorate.engines.shared.buffers import Buffers
from quorate.engines.shared.compute import check_dense
from quorate.engines.shared.update import Weights
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.learner import Learner


class WorkerModel:
    """The model, its learner and its data. It computes gradients at the parameters that the learner points at."""

    def __init__(self, job: Job, device: torch.device) -> None:
        assert job.task is not None
        self.task, self.ledger, self.seed = job.task, job.ledger, job.seed
        self.batches = Batches(job.task, job.ledger, job.seed, device)
        self.learner = Learner(self.task, job.learning, job.seed, device)
        self.learner.model.train()
        self.buffers = Buffers(self.learner.model)
        self._checked_dense = False

    def backward(self, batches: Sequence[int], scale: float = 1.0) -> Tensor:
        """Forward and backward over these batches as one; adds `scale` × gradient to `.grad` and returns the loss."""
        self.buffers.settle()
        self.batches.seed(batches[0])
        loss = self.task.loss(self.learner.model, self.batches.load(batches))
        (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss

    def trial_gradient(self, *batches: int) -> list[Tensor | None]:
        """The gradient of these batches as one, by parameter, at the newest version. It changes no state."""
        try:
            self.backward(batches)
            self.gradients()  # raises if a gradient is sparse
            return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.learner.params]
        finally:
            self.learner.clear_gradients()
            self.buffers.reset()

    def last_batch_has_all_gradients(self) -> bool:
        """Whether a smaller last batch of an epoch also gives every parameter a gradient."""
        last = (self.ledger.batches_per_epoch or 1) - 1
        if self.ledger.size(last) == self.ledger.size(0):
            return True
        try:
            return all(grad is not None for grad in self.trial_gradient(last))
        except Exception:  # training raises it again if it ever reaches that batch
            return True

    def gradients(self) -> list[Tensor]:
        """The gradients just computed."""
        grads = self.learner.gradients()
        if not self._checked_dense:
            self._checked_dense = True
            check_dense(grads)
        return grads


class Strategy(ABC):
    """Decides when gradients are computed and how they are combined."""

    #: Recorded in the trace: a replay must combine gradients in the same way to get the same bits.
    arithmetic: str

    def __init__(self, worker: WorkerModel) -> None:
        self.worker = worker
        self.learner = worker.learner

    def started(self, ticket: Ticket) -> None:  # noqa: B027 - optional
        """A worker has read the ticket's version and begins to compute."""

    @abstractmethod
    def arrived(self, ticket: Ticket) -> bool:
        """The gradient is due; returns False if it holds NaN or Inf."""

    def ended(self, ticket: Ticket) -> None:  # noqa: B027 - optional
        """The ticket will not be applied."""

    @abstractmethod
    def apply(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        """Make the next version."""


# ---------------------------------------------------------------- the parameters as one vector


#: Optimizers with elementwise steps, which do not depend on the tensor that an element is in.
_ELEMENTWISE = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam, torch.optim.AdamW)


class FlatOptimizer:
    """Gives the learner's optimizer one flat vector in place of its parameters: a few calls instead of hundreds.

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
