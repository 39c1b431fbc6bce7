"""Convolutions as products of matrices: many small ones with weights of their own are one batched product.

Torch turns side-by-side convolutions into one with as many groups, for which libraries have no fast kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class ConvolutionsAsMatmul(TorchFunctionMode):
    """Within it, plain 2-d convolutions are computed as products; all others as ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            return conv2d(*args, **(kwargs or {}))
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
    seen = [
        x[
            :,
            :,
            far * row : far * row + up * (height - 1) + 1 : up,
            wide * at : wide * at + across * (width - 1) + 1 : across,
        ]
        for row in range(rows)
        for at in range(columns)
    ]
    matrix = (seen[0] if len(seen) == 1 else torch.stack(seen, 1)).reshape(channels * rows * columns, -1)
    y = (weight.reshape(out, -1) @ matrix).view(out, n, height, width)
    if bias is not None:
        y = y + bias[:, None, None, None]
    return y.transpose(0, 1)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
