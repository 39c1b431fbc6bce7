"""A synchronous round as one big batch, computed when it is applied: what a GPU is good at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from quorate.engines._bench import Bench, Strategy
from quorate.engines._groups import each_group_by_itself, has_batch_norm
from quorate.engines._one_vector import as_one_vector, vector_of
from quorate.engines._recorded import Recorded
from quorate.engines._summed import Summed
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.learner import global_norm, squared_norm
from quorate.noise import EVERY, Norms, is_measured

#: One batch apart may take a device as long as the whole round, so norms are taken less often here.
_MEASURE_EVERY = 16 * EVERY


class Together(Strategy):
    """Right for a loss that is a mean over samples, which `may_go_together` finds out by trying.

    BatchNorm still normalises every worker's batch by itself. NaN and Inf are found when the round is applied;
    the round is then computed one by one, and what is finite is applied.

    recording: of the usual round, which is then one replay.
    """

    arithmetic = "together"

    def __init__(self, bench: Bench, recording: Recorded | None = None) -> None:
        super().__init__(bench)
        self._one_by_one = Summed(bench)
        self._recording = recording
        self._has_batch_norm = has_batch_norm(bench.learner.model)
        self._one_vector = None if recording is None else as_one_vector(bench.learner)

    def started(self, ticket: Ticket) -> None:
        pass

    def arrived(self, ticket: Ticket) -> bool:
        return True

    def ended(self, ticket: Ticket, arrived: bool) -> None:
        pass

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        assert weights is None
        is_usual = self._recording is not None and self._recording.is_of([ticket.samples for ticket in tickets])
        uneven = self._has_batch_norm and len({ticket.samples for ticket in tickets}) > 1
        if uneven or (len(tickets) == 1 and not is_usual):
            return self._one_by_one.apply_one_by_one(tickets)  # groups of BatchNorm must be of one size
        measured = len(tickets) > 1 and is_measured(self.learner.version, _MEASURE_EVERY)
        first_sq = self._first_alone(tickets[0]) if measured else None
        outcome = self._replayed(tickets) if is_usual else self._called(tickets)
        if outcome is None:
            self.learner.clear_gradients()
            self.bench.buffers.reset()
            return self._one_by_one.apply_one_by_one(tickets)
        self.learner.clear_gradients()
        if len(tickets) == 1 and self.learner.learning.clip_norm is None:
            return outcome._replace(norm=None)  # as one by one, so that a trace does not tell
        if first_sq is None or outcome.norm is None:
            return outcome
        norms = Norms(first_sq, tickets[0].samples, outcome.norm**2, sum(ticket.samples for ticket in tickets))
        return outcome._replace(norms=norms)

    def _called(self, tickets: tuple[Ticket, ...]) -> Outcome | None:
        """Call by call. None, and nothing is changed: something is not finite."""
        loss, norm = compute_together(self.bench, tickets)
        if not math.isfinite(loss) or not math.isfinite(norm):
            return None
        self.bench.buffers.advance([self.bench.buffers.after_forward()], [1.0])
        self.learner.step(norm)
        return Outcome(loss, norm)

    def _replayed(self, tickets: tuple[Ticket, ...]) -> Outcome | None:
        """The same, as one replay."""
        recording, learner, buffers = self._recording, self.learner, self.bench.buffers
        assert recording is not None
        recording.start.buffer.copy_(buffers.flat.buffer)
        recording.replay(sorted(ticket.batch for ticket in tickets))
        loss, norm = recording.numbers.tolist()
        if not math.isfinite(loss) or not math.isfinite(norm):
            return None
        buffers.advance_by(recording.after, None)
        if self._one_vector is None:
            for parameter, view in zip(learner.params, recording.gradient.views, strict=True):
                parameter.grad = view
            learner.step(norm)
        else:
            self._one_vector.gradient = vector_of(recording.gradient)
            learner.step(norm, (self._one_vector.gradient,))
        return Outcome(loss, norm)

    def _first_alone(self, ticket: Ticket) -> float:
        """The squared norm of one arrival's gradient, computed beside the round; nothing is changed by it."""
        self.bench.backward([ticket.batch])
        found = squared_norm(self.bench.gradients())
        self.bench.buffers.reset()
        self.learner.clear_gradients()
        return found


def compute_together(bench: Bench, tickets: tuple[Ticket, ...]) -> tuple[float, float]:
    """Put the mean of the tickets' gradients into `.grad`; gives the loss and the gradient's norm."""
    with each_group_by_itself(bench.learner.model, len(tickets)):
        # In the order of the data, where they are one slice; which worker had which makes no difference.
        loss = bench.backward(sorted(ticket.batch for ticket in tickets))
    norms = torch.stack(torch._foreach_norm(bench.gradients()))
    # One wait for the device, for both numbers.
    both = torch.stack([loss.detach().double(), torch.linalg.vector_norm(norms).double()]).tolist()
    return both[0], both[1]


def may_go_together(bench: Bench) -> bool:
    """Whether two batches as one give the mean of their gradients. Nothing is changed by asking."""
    if bench.ledger.batches_per_epoch is not None and bench.ledger.batches_per_epoch < 2:
        return False
    first, second = 0, 1
    if bench.ledger.size(first) != bench.ledger.size(second):
        return False
    with without_chance(bench.learner.model), full_precision():
        with each_group_by_itself(bench.learner.model, 2):
            bench.backward([first, second])
        together = [grad.clone() for grad in bench.gradients()]
        bench.buffers.reset()
        bench.learner.clear_gradients()
        for batch in (first, second):
            bench.backward([batch], 0.5)
            bench.buffers.reset()
        apart = bench.gradients()
    bench.learner.clear_gradients()
    if len(together) != len(apart):
        return False
    # All tensors as one: a bias before BatchNorm has no gradient but rounding. Where rounding differs by 1e-4,
    # a loss that is no mean differs by about its whole size.
    difference = global_norm([one - other for one, other in zip(together, apart, strict=True)])
    return difference <= 1e-2 * global_norm(apart) + 1e-6


@contextmanager
def full_precision() -> Iterator[None]:
    """tf32 rounds so coarsely that a deep net's gradients change with the shape of the batch."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


@contextmanager
def without_chance(model: nn.Module) -> Iterator[None]:
    """Dropout draws other masks for one big batch; it must not hide that the gradients agree.

    Nor must shifted and mirrored pictures: a loss asks the model as a whole (`model.training`) whether to make them.
    """
    chance = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    switched = [module for module in (model, *chance) if module.training]
    for module in switched:
        module.training = False  # of itself alone: BatchNorm within goes on as in training
    try:
        yield
    finally:
        for module in switched:
            module.training = True
