"""Real gradients in one process: one model that stands in for every simulated worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from quorate.engines.base import Job, Outcome
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.learner import Learner
from quorate.seeds import GOLDEN64, MASK64, derive, mix64


class Bench:
    """The model, its learner and its data: computes the gradient of batches at the parameters it points at.

    A batch's randomness (dropout, augmentation) is seeded by the batch, so that it is the same on any engine,
    in any order and on any retry.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        assert job.task is not None
        self.task, self.ledger, self.device = job.task, job.ledger, device
        self.task.on_device(device)
        self.learner = Learner(self.task, job.learning, job.seed, device)
        self.learner.model.train()
        self.buffers = Buffers(self.learner)
        self._seed = derive(job.seed, "batch")
        self._seen_dense = False
        self._on_cuda = device.type == "cuda"
        self._epochs: dict[int, _Epoch] = {}  # the newest few

    def backward(self, batches: Sequence[int], scale: float = 1.0) -> Tensor:
        """Forward and backward over these batches as one; adds `scale` × gradient to `.grad`, gives the loss."""
        indices = self._samples(batches)
        seed = mix64((self._seed + batches[0] * GOLDEN64) & MASK64) >> 1
        torch.default_generator.manual_seed(seed)
        if self._on_cuda:
            torch.cuda.manual_seed(seed)
        loss = self.task.loss(self.learner.model, self.task.batch(indices, self.device))
        (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss

    def _samples(self, batches: Sequence[int]) -> Tensor:
        """Indices of the samples in these batches, where the data is."""
        ledger = self.ledger
        per_epoch = ledger.batches_per_epoch
        if per_epoch is None:
            return torch.tensor([index for batch in batches for index in ledger.indices(batch)])
        if len(batches) == 1:
            return self._epoch(batches[0] // per_epoch).batches[batches[0] % per_epoch]
        pieces = []
        for first, last in _runs(batches, per_epoch):
            start = first % per_epoch * ledger.batch_size
            stop = start + (last - first + 1) * ledger.batch_size
            pieces.append(self._epoch(first // per_epoch).order[start:stop])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _epoch(self, epoch: int) -> _Epoch:
        found = self._epochs.get(epoch)
        if found is None:
            order = self.ledger.order(epoch, self.task.index_device)
            found = self._epochs[epoch] = _Epoch(order, self.ledger.batch_size)
            if len(self._epochs) > 3:  # a straggler may still hold a batch of the epoch before
                del self._epochs[min(self._epochs)]
        return found

    def gradients(self) -> list[Tensor]:
        """The gradients just computed."""
        grads = self.learner.gradients()
        if not self._seen_dense:
            self._seen_dense = True
            if any(grad.is_sparse for grad in grads):
                raise BadInput("the model gives sparse gradients, which cannot be averaged here; use sparse=False")
        return grads


class _Epoch:
    """The order of the samples in an epoch; its batches as slices of it."""

    def __init__(self, order: Tensor, batch_size: int) -> None:
        self.order, self._batch_size = order, batch_size

    @cached_property
    def batches(self) -> tuple[Tensor, ...]:
        return torch.split(self.order, self._batch_size)


def _runs(batches: Sequence[int], per_epoch: int) -> list[tuple[int, int]]:
    """Runs of neighbouring batches of one epoch, as (first, last): each is one slice of the epoch's order."""
    runs: list[tuple[int, int]] = []
    for batch in batches:
        if runs and batch == runs[-1][1] + 1 and batch % per_epoch:
            runs[-1] = (runs[-1][0], batch)
        else:
            runs.append((batch, batch))
    return runs


class Buffers:
    """BatchNorm statistics and the like. A forward pass changes them; the newest version has the average.

    Float buffers are averaged over the kept arrivals, weighted by samples. Of a stale arrival it is the
    change that counts. Whole numbers (how many batches were seen) go up as they do for one worker.
    """

    def __init__(self, learner: Learner) -> None:
        buffers = list(learner.model.buffers())
        self._live = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._live_counters = [buffer for buffer in buffers if not buffer.is_floating_point()]
        self._newest = [buffer.clone() for buffer in self._live]
        self._newest_counters = [counter.clone() for counter in self._live_counters]
        self.any = bool(buffers)

    def after_forward(self) -> list[Tensor]:
        """A copy of what the forward pass made of them; the model gets those of the newest version back."""
        if not self.any:
            return []
        after = [buffer.clone() for buffer in (*self._live, *self._live_counters)]
        self.reset()
        return after

    def newest(self) -> list[Tensor]:
        """A copy of the newest version's."""
        return [buffer.clone() for buffer in (*self._newest, *self._newest_counters)] if self.any else []

    def load(self, buffers: list[Tensor]) -> None:
        """Let the model see these."""
        for live, given in zip((*self._live, *self._live_counters), buffers, strict=True):
            live.copy_(given)

    def reset(self) -> None:
        """Let the model see the newest version's."""
        for live, newest in zip(self._live, self._newest, strict=True):
            live.copy_(newest)
        for live, newest in zip(self._live_counters, self._newest_counters, strict=True):
            live.copy_(newest)

    def advance(
        self, after: list[list[Tensor]], shares: list[float], read: list[list[Tensor] | None] | None = None
    ) -> None:
        """The next version's, from those after each arrival's forward; `read` has those a stale one began with."""
        if not self.any:
            return
        newest = [*self._newest, *self._newest_counters]
        if len(after) == 1 and (read is None or read[0] is None):
            for now, only in zip(newest, after[0], strict=True):  # as it is: one worker equals a plain loop
                now.copy_(only)
        else:
            began = [given or newest for given in (read or [None] * len(after))]
            for place, now in enumerate(newest):
                if now.dtype == torch.bool or now.is_complex():  # a mask, a table: no statistics
                    now.copy_(after[-1][place])
                    continue
                changes = torch.stack([_change(a[place], b[place]) for a, b in zip(after, began, strict=True)])
                if now.is_floating_point():
                    weights = torch.tensor(shares, dtype=now.dtype, device=now.device)
                    now.add_(torch.tensordot(weights, changes, dims=1))
                else:
                    now.add_(changes.amax(0))
        self.reset()


def _change(after: Tensor, before: Tensor) -> Tensor:
    """after − before; nothing where they are equal, also where both are infinite, as in an attention mask."""
    return torch.where(after == before, torch.zeros_like(after), after - before)


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
