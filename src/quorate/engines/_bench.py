"""Real gradients in one process: one model that stands in for every simulated worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quorate.engines._batches import Batches
from quorate.engines._buffers import Buffers
from quorate.engines.base import Job, Outcome
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.learner import Learner


class Bench:
    """The model, its learner and its data: computes the gradient of batches at the parameters it points at."""

    def __init__(self, job: Job, device: torch.device) -> None:
        assert job.task is not None
        self.task, self.ledger, self.seed = job.task, job.ledger, job.seed
        self.batches = Batches(job.task, job.ledger, job.seed, device)
        self.learner = Learner(self.task, job.learning, job.seed, device)
        self.learner.model.train()
        self.buffers = Buffers(self.learner.model)
        self._seen_dense = False

    def backward(self, batches: Sequence[int], scale: float = 1.0) -> Tensor:
        """Forward and backward over these batches as one; adds `scale` × gradient to `.grad`, gives the loss."""
        self.buffers.settle()
        self.batches.seed(batches[0])
        loss = self.task.loss(self.learner.model, self.batches.load(batches))
        (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss

    def alone(self, *batches: int) -> list[Tensor | None]:
        """The gradient of these, as one, at the newest version, by parameter; nothing is changed by asking."""
        try:
            self.backward(batches)
            self.gradients()  # says so if they are sparse
            return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.learner.params]
        finally:
            self.learner.clear_gradients()
            self.buffers.reset()

    def short_batch_is_whole(self) -> bool:
        """Whether the last batch of an epoch, if it is a smaller one, gives every parameter a gradient."""
        last = (self.ledger.batches_per_epoch or 1) - 1
        if self.ledger.size(last) == self.ledger.size(0):
            return True
        try:
            return all(grad is not None for grad in self.alone(last))
        except Exception:  # it says so when its turn comes, if ever
            return True

    def gradients(self) -> list[Tensor]:
        """The gradients just computed."""
        grads = self.learner.gradients()
        if not self._seen_dense:
            self._seen_dense = True
            check_dense(grads)
        return grads


def check_dense(grads: Sequence[Tensor]) -> None:
    if any(grad.is_sparse for grad in grads):
        raise BadInput("the model gives sparse gradients, which cannot be averaged here; use sparse=False")


class Strategy(ABC):
    """When gradients are computed and how they are combined. Work that is cancelled is never computed."""

    #: Named in the trace: a replay must combine gradients in the same way to get the same bits.
    arithmetic: str

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.learner = bench.learner

    @abstractmethod
    def started(self, ticket: Ticket) -> None:
        """A worker begins, reading the ticket's version."""

    @abstractmethod
    def arrived(self, ticket: Ticket) -> bool:
        """The gradient is due; False if it holds NaN or Inf."""

    @abstractmethod
    def ended(self, ticket: Ticket, arrived: bool) -> None:
        """The ticket will not be applied."""

    @abstractmethod
    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        """Make the next version."""
