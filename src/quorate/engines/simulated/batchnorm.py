"""BatchNorm in one big batch that keeps separate statistics for each worker's part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

#: Up to this many groups, one BatchNorm call per group costs less than copying all of them into another layout.
_FEW_GROUPS = 4


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


@contextmanager
def batch_norm_per_group(model: nn.Module, groups: int) -> Iterator[None]:
    """Let BatchNorm treat a batch as `groups` consecutive batches, each with its own statistics."""
    with ExitStack() as stack:
        for module in model.modules():
            if groups > 1 and isinstance(module, _BatchNorm):
                module.forward = partial(_grouped_batch_norm, module, groups)  # type: ignore[method-assign]
                stack.callback(delattr, module, "forward")
        yield


def _grouped_batch_norm(norm: _BatchNorm, groups: int, x: Tensor) -> Tensor:
    """One batch_norm for each group; all groups begin with the same running statistics."""
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
    """Turn groups into channels, so that one batch_norm call normalises all of them."""
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
    """All groups at once for the channels-last layout: a few passes over memory for any number of groups."""
    n, channels, height, width = x.shape
    table = x.permute(0, 2, 3, 1).reshape(groups, -1, channels)  # a view: this is the memory order
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
    scale = scale * norm.weight if norm.affine else scale
    shift = -mean * scale + norm.bias if norm.affine else -mean * scale
    y = torch.addcmul(shift[:, None], table, scale[:, None]).to(x.dtype)
    return y.view(n, height, width, channels).permute(0, 3, 1, 2)


def _group_by_group(
    norm: _BatchNorm, groups: int, x: Tensor, means: Tensor | None, variances: Tensor | None, own: bool, factor: float
) -> Tensor:
    """One call per group for the channels-last layout, where another layout would cost more than the calls."""
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
