"""Calls in other words, where torch is slow to make several of them at once.

Convolutions as products of matrices: many small ones with weights of their own are one batched product. Torch turns
them into one with as many groups, for which libraries have no fast kernels. Of weight norm torch makes a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Batchable(TorchFunctionMode):
    """Within it, plain 2-d convolutions and weight norm are computed as here; all else as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            return conv2d(*args, **(kwargs or {}))
        if func is torch._weight_norm:
            return weight_norm(*args, **(kwargs or {}))
        if func is Tensor.view:  # of a picture whose channels lie outermost there may be none
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError:
                return func(args[0].contiguous(), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.conv2d`.

    Channels lie outermost in what is computed and in what is given back: elementwise calls keep it so, and the next
    convolution finds it as it wants it.
    """
    if groups != 1 or isinstance(padding, str) or x.dim() != 4:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    (up, across), (below, beside), (far, wide) = _pair(stride), _pair(padding), _pair(dilation)
    out, channels, rows, columns = weight.shape
    if below or beside:
        x = functional.pad(x, (beside, beside, below, below))
    n, _, height, width = x.shape
    height = (height - far * (rows - 1) - 1) // up + 1
    width = (width - wide * (columns - 1) - 1) // across + 1
    x = x.transpose(0, 1)
    places = tuple(
        (_every(up, far * row, height), _every(across, wide * at, width))
        for row in range(rows)
        for at in range(columns)
    )
    seen = x[:, :, *places[0]] if len(places) == 1 else _Seen.apply(x, places)  # type: ignore[no-untyped-call]
    matrix = seen.reshape(channels * rows * columns, -1)
    y = (weight.reshape(out, -1) @ matrix).view(out, n, height, width)
    if bias is not None:
        y = y + bias[:, None, None, None]
    return y.transpose(0, 1)


class _Seen(torch.autograd.Function):
    """What a kernel sees at each of its places, of pictures [channels, n, h, w]: [channels, places, n, h', w'].

    Torch's own way back would fill a picture with zeros for every place, and add them all.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, places: tuple[tuple[slice, slice], ...]) -> Tensor:
        return torch.stack([x[:, :, rows, columns] for rows, columns in places], 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
        ctx.shape, ctx.places = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.new_zeros(ctx.shape)
        for at, (rows, columns) in enumerate(ctx.places):
            total[:, :, rows, columns] += grad[:, at]
        return total, None


def weight_norm(direction: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """As torch's own, which cannot be batched: `length` × `direction`, which is scaled to length 1 but for `dim`."""
    others = [other for other in range(direction.dim()) if other != dim % direction.dim()] if dim != -1 else None
    norm: Tensor = torch.linalg.vector_norm(direction, dim=others, keepdim=True)
    return direction * (length / norm)


def _every(step: int, start: int, count: int) -> slice:
    return slice(start, start + step * (count - 1) + 1, step)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
