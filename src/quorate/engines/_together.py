"""A synchronous round as one big batch, computed when it is applied: what a GPU is good at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from quorate.engines._bench import Bench, Strategy
from quorate.engines._summed import Summed
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.learner import global_norm, squared_norm
from quorate.noise import EVERY, Norms, is_measured

#: One batch apart may take a device as long as the whole round, so norms are taken less often here.
_MEASURE_EVERY = 16 * EVERY
#: Up to so many, a call of BatchNorm each costs less than moving all of them about.
_FEW_GROUPS = 4


class Together(Strategy):
    """Right for a loss that is a mean over samples, which `may_go_together` finds out by trying.

    BatchNorm still normalises every worker's batch by itself. NaN and Inf are found when the round is applied;
    the round is then computed one by one, and what is finite is applied.
    """

    arithmetic = "together"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._one_by_one = Summed(bench)

    def started(self, ticket: Ticket) -> None:
        pass

    def arrived(self, ticket: Ticket) -> bool:
        return True

    def ended(self, ticket: Ticket, arrived: bool) -> None:
        pass

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        assert weights is None
        if len(tickets) == 1 or (self.bench.buffers.any and len({ticket.samples for ticket in tickets}) > 1):
            return self._one_by_one.apply_one_by_one(tickets)  # groups of BatchNorm must be of one size
        first_sq = self._first_alone(tickets[0]) if is_measured(self.learner.version, _MEASURE_EVERY) else None
        loss, norm = compute_together(self.bench, tickets)
        if not math.isfinite(loss) or not math.isfinite(norm):
            self.bench.buffers.reset()
            return self._one_by_one.apply_one_by_one(tickets)
        self.bench.buffers.advance([self.bench.buffers.after_forward()], [1.0])
        self.learner.step(norm)
        self.learner.clear_gradients()
        norms = None
        if first_sq is not None:
            norms = Norms(first_sq, tickets[0].samples, norm * norm, sum(ticket.samples for ticket in tickets))
        return Outcome(loss, norm, norms=norms)

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
    both = torch.stack([loss.detach().float(), torch.linalg.vector_norm(norms).float()]).tolist()
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


@contextmanager
def each_group_by_itself(model: nn.Module, groups: int) -> Iterator[None]:
    """Let BatchNorm treat a batch as `groups` batches side by side, each with statistics of its own."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.forward = partial(_grouped_batch_norm, module, groups)  # type: ignore[method-assign]
                stack.callback(delattr, module, "forward")
        yield


def _grouped_batch_norm(norm: _BatchNorm, groups: int, x: Tensor) -> Tensor:
    """As many calls of batch_norm in one, each with the statistics that a worker's batch begins with."""
    tracked = norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None
    means = cast(Tensor, norm.running_mean).repeat(groups, 1) if tracked else None
    variances = cast(Tensor, norm.running_var).repeat(groups, 1) if tracked else None
    factor = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and tracked and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    normalise = _groups_as_channels
    if channels_last:
        normalise = _group_by_group if groups <= _FEW_GROUPS else _by_formula
    y = normalise(norm, groups, x, means, variances, norm.training or not tracked, factor)
    if tracked and norm.training:
        assert means is not None and variances is not None
        cast(Tensor, norm.running_mean).copy_(means.mean(0))
        cast(Tensor, norm.running_var).copy_(variances.mean(0))
    return y


def _groups_as_channels(
    norm: _BatchNorm, groups: int, x: Tensor, means: Tensor | None, variances: Tensor | None, own: bool, factor: float
) -> Tensor:
    """Groups become channels, so that one batch_norm call serves them all."""
    batch, channels = x.shape[0] // groups, x.shape[1]
    rest = x.shape[2:]
    y = functional.batch_norm(
        x.reshape(groups, batch, channels, *rest).transpose(0, 1).reshape(batch, -1, *rest),
        None if means is None else means.view(-1),
        None if variances is None else variances.view(-1),
        norm.weight.repeat(groups) if norm.affine else None,
        norm.bias.repeat(groups) if norm.affine else None,
        own,
        factor,
        norm.eps,
    )
    return y.reshape(batch, groups, channels, *rest).transpose(0, 1).reshape(x.shape)


def _by_formula(
    norm: _BatchNorm, groups: int, x: Tensor, means: Tensor | None, variances: Tensor | None, own: bool, factor: float
) -> Tensor:
    """All groups at once where channels lie innermost: a few passes over memory, however many groups there are."""
    n, channels, height, width = x.shape
    table = x.permute(0, 2, 3, 1).reshape(groups, -1, channels)  # as it lies
    if own:
        variance, mean = torch.var_mean(table, dim=1, correction=0)
        if means is not None and variances is not None:
            count = table.shape[1]
            with torch.no_grad():
                means.lerp_(mean.float(), factor)
                variances.lerp_(variance.float() * (count / max(1, count - 1)), factor)
    else:
        assert means is not None and variances is not None
        variance, mean = variances, means
    scale = (variance + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight
    shift = -mean * scale
    if norm.affine:
        shift = shift + norm.bias
    y = torch.addcmul(shift[:, None], table, scale[:, None]).to(x.dtype)
    return y.view(n, height, width, channels).permute(0, 3, 1, 2)


def _group_by_group(
    norm: _BatchNorm, groups: int, x: Tensor, means: Tensor | None, variances: Tensor | None, own: bool, factor: float
) -> Tensor:
    """One call each, where channels lie innermost: moving them about would cost more than the calls."""
    pieces = [
        functional.batch_norm(
            piece,
            None if means is None else means[group],
            None if variances is None else variances[group],
            norm.weight,
            norm.bias,
            own,
            factor,
            norm.eps,
        )
        for group, piece in enumerate(torch.chunk(x, groups))
    ]
    return torch.cat(pieces)
