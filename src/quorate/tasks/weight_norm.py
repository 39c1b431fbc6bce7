"""Layers with weight norm (Salimans and Kingma 2016): a filter is a direction, and a length of its own.

torch has it as a parametrization, but a model with one cannot be sent to another process.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

#: How long directions are at the start. A step turns a long one less, so that the loss is curved less steeply: the net
#: of mnist.py bears a staleness of 10 at a learning rate of 0.1 with directions of 4, and not with directions of 1.
START = 4.0


class _WeightNorm(nn.Module):
    """direction: [out, …], of any length but 0; length: [out, 1, …], which is 1 at the start; bias: [out]."""

    def __init__(self, out: int, *rest: int) -> None:
        super().__init__()
        drawn = functional.normalize(torch.randn(out, math.prod(rest)))
        self.direction = nn.Parameter(START * drawn.view(out, *rest))
        self.length = nn.Parameter(torch.ones(out, *(1 for _ in rest)))
        self.bias = nn.Parameter(torch.zeros(out))

    @property
    def weight(self) -> Tensor:
        """length · direction / |direction|, for each of the filters."""
        return torch._weight_norm(self.direction, self.length, 0)


class WeightNormConv2d(_WeightNorm):
    """`nn.Conv2d` with weight norm."""

    def __init__(self, channels: int, out: int, size: int, padding: int = 0) -> None:
        super().__init__(out, channels, size, size)
        self.padding = padding

    def forward(self, images: Tensor) -> Tensor:
        """Pictures [n, channels, h, w] to [n, out, h', w']."""
        return functional.conv2d(images, self.weight, self.bias, padding=self.padding)


class WeightNormLinear(_WeightNorm):
    """`nn.Linear` with weight norm."""

    def __init__(self, inputs: int, out: int) -> None:
        super().__init__(out, inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """[n, inputs] to [n, out]."""
        return functional.linear(inputs, self.weight, self.bias)
