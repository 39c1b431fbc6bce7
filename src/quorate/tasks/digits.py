"""Handwritten digits, 8×8 pixels: small enough to ship, hard enough to tell policies apart.

Data: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
CC BY 4.0 (1,797 images). The last fifth is held out for the test.
"""

from __future__ import annotations

import csv
import gzip
import io
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from quorate.task import Task

TEST_SHARE = 0.2


@cache
def load_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] in 0..1 and labels [1797]."""
    packed = resources.files("quorate").joinpath("data/digits.csv.gz").read_bytes()
    rows = list(csv.reader(io.StringIO(gzip.decompress(packed).decode())))
    table = torch.tensor([[int(float(value)) for value in row] for row in rows])
    return (table[:, :64].float() / 16.0).reshape(-1, 1, 8, 8), table[:, 64]


def split_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test data, in a fixed shuffled order."""
    images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(20160404))
    cut = round(len(labels) * (1 - TEST_SHARE))
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Digits(Task):
    """A small convolutional net on the digits; test accuracy and test loss are its measures.

    The learning rate suits full sync on 8 workers: of 0.05 to 0.2, by the median time to 95 % over ten seeds, 0.1
    and 0.14 were best, and 0.2 did not always get there. Stale gradients want less: async some 0.005.
    """

    batch_size = 16

    def __init__(self, lr: float = 0.1, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self._train, self._test = split_digits()

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def train_data(self) -> TensorDataset:
        return self._train

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        images, labels = (tensor.to(device) for tensor in self._test.tensors)
        scores = model(images)
        accuracy = (scores.argmax(1) == labels).float().mean()
        return {"accuracy": float(accuracy), "test_loss": float(functional.cross_entropy(scores, labels))}
