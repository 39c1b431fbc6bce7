"""Gradients of synchronous rounds, summed one by one or computed as one big batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from quorate.engines.base import Outcome
from quorate.engines.shared.update import Weights, noise_norms, weights_of
from quorate.engines.simulated.asynchronous import KeptGradients
from quorate.engines.simulated.batchnorm import batch_norm_per_group, has_batch_norm
from quorate.engines.simulated.cuda_graphs import GradientGraph
from quorate.engines.simulated.model import Strategy, WorkerModel, flatten_optimizer, vector_of
from quorate.events import Ticket
from quorate.learner import all_finite, global_norm, squared_norm
from quorate.noise import EVERY, is_measured
from quorate.policies import Policy


class OneByOne(Strategy):
    """Sums gradients in place, for policies that apply unweighted gradients of the newest version only.

    A gradient is computed when its ticket arrives, so cancelled tickets cost nothing. A ticket whose loss is not
    finite is refused at its arrival. To find NaN or Inf in a gradient with a finite loss would cost a pass over every
    gradient; instead the sum is checked before it is applied, and the bad gradients are left out.
    """

    arithmetic = "summed"

    def __init__(self, worker: WorkerModel) -> None:
        super().__init__(worker)
        self._clear()

    def _clear(self) -> None:
        self.learner.clear_gradients()
        self._tickets: list[Ticket] = []
        self._scales: list[float] = []  # samples of each arrival relative to the first arrival
        self._losses: list[float] = []
        self._after: list[list[Tensor]] = []
        self._first_sq: float | None = None  # squared norm of the first arrival's gradient, on measured versions

    # `ended` does nothing: `apply` sums again if the sum holds a ticket that was dropped.

    def arrived(self, ticket: Ticket) -> bool:
        # A late ticket can only be dropped, so its gradient is not computed.
        return ticket.version != self.learner.version or self._add(ticket)

    def _add(self, ticket: Ticket) -> bool:
        """Add an arrival to the sum. If its loss is not finite, return False and leave the sum unchanged."""
        scale = ticket.samples / self._tickets[0].samples if self._tickets else 1.0
        loss = self.worker.backward([ticket.batch], scale).item()
        after = self.worker.buffers.after_forward()
        if not math.isfinite(loss):
            self._sum_again(self._tickets)
            return False
        if not self._tickets and is_measured(self.learner.version):
            self._first_sq = squared_norm(self.worker.gradients())  # the sum holds only this gradient so far
        self._tickets.append(ticket)
        self._scales.append(scale)
        self._losses.append(loss)
        if after:
            self._after.append(after)
        return True

    def _sum_again(self, tickets: list[Ticket]) -> None:
        """Compute the sum again. This is so rare that it costs less than storing every gradient."""
        self._clear()
        for ticket in tickets:
            self._add(ticket)

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights = None) -> Outcome:
        assert weights is None, "weighted gradients need KeptGradients"
        if list(tickets) != self._tickets:
            self._sum_again(list(tickets))
        grads = self.worker.gradients()
        return self._step(grads) if all_finite(grads) else self._leave_out(list(tickets))

    def _step(self, grads: list[Tensor]) -> Outcome:
        total = sum(self._scales)
        if total != 1.0:
            torch._foreach_div_(grads, total)
        shares = [scale / total for scale in self._scales]
        loss = sum(share * loss for share, loss in zip(shares, self._losses, strict=True))
        self.worker.buffers.advance(self._after, shares)
        norm = self.learner.norm_for_clipping()
        norms = None
        if self._first_sq is not None and len(self._tickets) > 1:
            norms = noise_norms(self._tickets, self._first_sq, squared_norm(grads))
        self.learner.step(norm)
        self._clear()
        return Outcome(loss, norm, norms=norms)

    def _leave_out(self, tickets: list[Ticket]) -> Outcome:
        """A gradient is not finite: test each gradient alone and apply the finite ones."""
        finite = []
        for ticket in tickets:
            self._sum_again([ticket])
            if self._tickets and all_finite(self.worker.gradients()):
                finite.append(ticket)
        refused = tuple(ticket for ticket in tickets if ticket not in finite)
        self._sum_again(finite)
        if not finite or not all_finite(self.worker.gradients()):  # the sum of finite gradients may overflow
            return self._nothing(tuple(tickets))
        return self._step(self.worker.gradients())._replace(refused=refused)

    def _nothing(self, refused: tuple[Ticket, ...]) -> Outcome:
        """An empty update. It still makes a version, since the policy counts it."""
        self._clear()
        self.learner.skip()
        return Outcome(None, None, refused)

    def apply_one_by_one(self, tickets: tuple[Ticket, ...]) -> Outcome:
        """Compute and apply these tickets, discarding the current sum."""
        self._clear()
        refused = tuple(ticket for ticket in tickets if not self._add(ticket))
        kept = tuple(ticket for ticket in tickets if ticket not in refused)
        if not kept:
            return self._nothing(refused)
        outcome = self.apply(kept)
        return outcome._replace(refused=refused + outcome.refused)


#: A single batch may take a GPU as long as the whole round, so norms are measured less often here.
_MEASURE_EVERY = 16 * EVERY


class BigBatch(Strategy):
    """Computes a round as one big batch, which requires a loss that is a mean over samples.

    `rounds_can_be_one_batch` tests that. BatchNorm still normalises every worker's batch separately. NaN and Inf are
    found when the round is applied; its gradients are then computed one by one, and the finite ones are applied.

    graph: the CUDA graph of a round of the usual size.
    """

    arithmetic = "together"

    def __init__(self, worker: WorkerModel, graph: GradientGraph | None = None) -> None:
        super().__init__(worker)
        self._one_by_one = OneByOne(worker)
        self._graph = graph
        self._has_batch_norm = has_batch_norm(worker.learner.model)
        self._flat_optimizer = None if graph is None else flatten_optimizer(worker.learner)

    def arrived(self, ticket: Ticket) -> bool:
        return True

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        assert weights is None
        is_usual = self._graph is not None and self._graph.is_of([ticket.samples for ticket in tickets])
        uneven = self._has_batch_norm and len({ticket.samples for ticket in tickets}) > 1
        if uneven or (len(tickets) == 1 and not is_usual):
            return self._one_by_one.apply_one_by_one(tickets)  # BatchNorm needs groups of equal size
        measured = len(tickets) > 1 and is_measured(self.learner.version, _MEASURE_EVERY)
        first_sq = self._squared_norm_of(tickets[0]) if measured else None
        outcome = self._apply_graph(tickets) if is_usual else self._apply_batch(tickets)
        self.learner.clear_gradients()
        if outcome is None:
            self.worker.buffers.reset()
            return self._one_by_one.apply_one_by_one(tickets)
        if len(tickets) == 1 and self.learner.learning.clip_norm is None:
            return outcome._replace(norm=None)  # as OneByOne does, so that traces are equal
        if first_sq is None or outcome.norm is None:
            return outcome
        return outcome._replace(norms=noise_norms(tickets, first_sq, outcome.norm**2))

    def _apply_batch(self, tickets: tuple[Ticket, ...]) -> Outcome | None:
        """Compute the round without a graph. If loss or gradient is not finite, return None and change no state."""
        loss, norm = compute_as_one_batch(self.worker, tickets)
        if not math.isfinite(loss) or not math.isfinite(norm):
            return None
        self.worker.buffers.advance([self.worker.buffers.after_forward()], [1.0])
        self.learner.step(norm)
        return Outcome(loss, norm)

    def _apply_graph(self, tickets: tuple[Ticket, ...]) -> Outcome | None:
        """As `_apply_batch`, with one launch of the graph."""
        graph, learner, buffers = self._graph, self.learner, self.worker.buffers
        assert graph is not None
        graph.start.buffer.copy_(buffers.flat.buffer)
        graph.launch(sorted(ticket.batch for ticket in tickets))
        loss, norm = graph.numbers.tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):
            return None
        buffers.advance_by(graph.after, None)
        if self._flat_optimizer is None:
            for parameter, view in zip(learner.params, graph.gradient.views, strict=True):
                parameter.grad = view
            learner.step(norm)
        else:
            self._flat_optimizer.gradient = vector_of(graph.gradient)
            learner.step(norm, (self._flat_optimizer.gradient,))
        return Outcome(loss, norm)

    def _squared_norm_of(self, ticket: Ticket) -> float:
        """The squared norm of one arrival's gradient. It changes no state."""
        self.worker.backward([ticket.batch])
        found = squared_norm(self.worker.gradients())
        self.worker.buffers.reset()
        self.learner.clear_gradients()
        return found


def compute_as_one_batch(worker: WorkerModel, tickets: tuple[Ticket, ...]) -> tuple[float, float]:
    """Put the mean of the tickets' gradients into `.grad`; returns the loss and the gradient's norm."""
    with batch_norm_per_group(worker.learner.model, len(tickets)):
        # Sorted, since consecutive batches are one slice of the data. The order does not change the mean.
        loss = worker.backward(sorted(ticket.batch for ticket in tickets))
    norms = torch.stack(torch._foreach_norm(worker.gradients()))
    # Both numbers in one tensor: the CPU waits for the device only once.
    both = torch.stack([loss.detach().double(), torch.linalg.vector_norm(norms).double()]).tolist()
    return both[0], both[1]


def rounds_can_be_one_batch(worker: WorkerModel) -> bool:
    """Whether two batches as one give the mean of their gradients. The test changes no state."""
    if worker.ledger.batches_per_epoch is not None and worker.ledger.batches_per_epoch < 2:
        return False
    if worker.ledger.size(0) != worker.ledger.size(1):
        return False
    with comparable_gradients(worker.learner.model):
        with batch_norm_per_group(worker.learner.model, 2):
            worker.backward([0, 1])
        together = [grad.clone() for grad in worker.gradients()]
        worker.buffers.reset()
        worker.learner.clear_gradients()
        for batch in (0, 1):
            worker.backward([batch], 0.5)
            worker.buffers.reset()
        separate = worker.gradients()
    worker.learner.clear_gradients()
    if len(together) != len(separate):
        return False
    # The norm is over all tensors: the gradient of a bias before BatchNorm is only rounding noise. Rounding differs
    # by about 1e-4; a loss that is not a mean differs by about the size of the whole gradient.
    difference = global_norm([one - other for one, other in zip(together, separate, strict=True)])
    return difference <= 1e-2 * global_norm(separate) + 1e-6


@contextmanager
def comparable_gradients(model: nn.Module) -> Iterator[None]:
    """Switch off randomness and tf32, which would hide that one big batch gives equal gradients.

    Dropout and augmentation draw other numbers for one big batch; a loss augments its pictures if the outermost module
    is in training mode (`model.training`). The rounding of tf32 is so coarse that a deep net's gradients change with
    the shape of the batch.
    """
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    dropout = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    switched = [module for module in (model, *dropout) if module.training]
    for module in switched:
        module.training = False  # not `eval()`: the BatchNorm modules inside stay in training mode
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul
        for module in switched:
            module.training = True


class DelayedBigBatch(KeptGradients):
    """Big batches for policies whose rounds read one version that is not the newest.

    The last versions are stored anyway, for tickets that start later, so a round is computed only when it is applied.
    If it cannot be one batch, or holds NaN or Inf, its gradients are computed one by one and the finite ones are
    applied. Delay compensation needs separate gradients and is not supported here.
    """

    arithmetic = BigBatch.arithmetic

    def __init__(self, worker: WorkerModel, policy: Policy) -> None:
        super().__init__(worker, policy)
        assert not self._compensation, "delay compensation needs separate gradients"
        self._has_batch_norm = has_batch_norm(worker.learner.model)

    def started(self, ticket: Ticket) -> None:
        pass

    def arrived(self, ticket: Ticket) -> bool:
        return True

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        learner, buffers = self.learner, self.worker.buffers
        # BatchNorm needs groups of equal size.
        uneven = self._has_batch_norm and len({ticket.samples for ticket in tickets}) > 1
        if len(tickets) == 1 or weights is not None or uneven:
            return self._one_by_one(tickets, weights)
        version = tickets[0].version
        assert all(ticket.version == version for ticket in tickets), "a round reads one version"
        with self._reading(version) as read_buffers:
            loss, norm = compute_as_one_batch(self.worker, tickets)
            after = buffers.after_forward()
        if not math.isfinite(loss) or not math.isfinite(norm):
            learner.clear_gradients()
            return self._one_by_one(tickets, weights)
        self._keep_newest()
        buffers.advance([after], [1.0], [None if version == learner.version else read_buffers])
        learner.step(norm)
        learner.clear_gradients()
        return Outcome(loss, norm)

    def _one_by_one(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        kept = []
        for place, ticket in enumerate(tickets):
            gradient = self._compute(ticket)
            if gradient is not None:
                self._gradients[ticket.id] = gradient
                kept.append(place)
        refused = tuple(ticket for place, ticket in enumerate(tickets) if place not in kept)
        if not kept:
            self._keep_newest()
            self.learner.skip()
            return Outcome(None, None, refused)
        good = tuple(tickets[place] for place in kept)
        outcome = super().apply(good, weights_of(weights, kept))
        return outcome._replace(refused=refused + outcome.refused)
