"""The nets and tasks that benchmarks share: MLPs of 0.1M and 5M parameters, and small convolutional nets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

WIDTHS = {"0.1M": [256, 256, 128, 10], "5M": [512, 1536, 1536, 1152, 10]}


class Regression:
    """An MLP that learns a fixed linear map."""

    def __init__(self, size: str, batch_size: int = 32, samples: int = 8192) -> None:
        self.widths, self.batch_size = WIDTHS[size], batch_size
        draws = torch.Generator().manual_seed(1)
        x = torch.randn(samples, self.widths[0], generator=draws)
        teacher = torch.randn(self.widths[0], 10, generator=draws) / self.widths[0] ** 0.5
        self.data = TensorDataset(x, x @ teacher)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def train_data(self) -> TensorDataset:
        return self.data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)


class Images:
    """A residual net for 32×32 images, with or without BatchNorm, on random pictures."""

    def __init__(self, width: int = 64, norm: bool = False, batch_size: int = 32, samples: int = 12_800) -> None:
        self.width, self.norm, self.batch_size = width, norm, batch_size
        draws = torch.Generator().manual_seed(1)
        labels = torch.randint(10, (samples,), generator=draws)
        pictures = torch.randn(samples, 3, 32, 32, generator=draws)
        pictures[:, 0, 0, :10] += 3 * functional.one_hot(labels, 10)  # something to learn
        self.data = TensorDataset(pictures, labels)

    def _block(self, inside: int, outside: int, stride: int) -> nn.Module:
        norm = nn.BatchNorm2d(outside) if self.norm else nn.Identity()
        return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), norm, nn.ReLU())

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            self._block(3, width, 1),
            self._block(width, width, 1),
            self._block(width, 2 * width, 2),
            self._block(2 * width, 2 * width, 1),
            self._block(2 * width, 4 * width, 2),
            self._block(4 * width, 4 * width, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def train_data(self) -> TensorDataset:
        return self.data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
