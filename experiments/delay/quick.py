"""The study in seconds: made-up pictures and tiny nets, on the CPU. Its numbers mean nothing; its path is the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quorate
from experiments.delay.results import append_rows, final_accuracy
from experiments.delay.settings import QUICK, Setting
from experiments.delay.study import Study
from experiments.delay.training import train_task
from quorate.tasks.images import accuracy_and_loss
from quorate.tasks.nets import alexnet, googlenet

_TINY = {"alexnet": partial(alexnet, width=0.1, dense=16), "googlenet": partial(googlenet, width=0.1, batch_norm=True)}

_METHODS = ((4, "compensation"), (4, "warm-up"), (0, "lr"), (4, "lr"))


class MadeUp(quorate.Task):
    """Pictures whose kind is their brightest quarter, more or less."""

    def __init__(self, net: str, lr: float, momentum: float, samples: int) -> None:
        self.net, self.lr, self.momentum = net, lr, momentum
        draws = torch.Generator().manual_seed(7)
        labels = torch.randint(0, 4, (samples,), generator=draws)
        images = torch.randn(samples, 3, 32, 32, generator=draws)
        for kind in range(4):
            row, column = 16 * (kind // 2), 16 * (kind % 2)
            images[labels == kind, :, row : row + 16, column : column + 16] += 1.0
        self._data = TensorDataset(images, labels)

    def model(self) -> nn.Module:
        return _TINY[self.net]()

    def train_data(self) -> TensorDataset:
        return self._data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, nesterov=True)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return accuracy_and_loss(model, *self._data.tensors)


def run_quick(folder: Path) -> None:
    """What the study does, with one seed and some of its methods."""
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(methods=_METHODS, seeds=(1,), most_tried=4)
    while (setting := study.next()) is not None:
        rows = _train(setting)
        append_rows(folder, rows)
        study.finished(setting, final_accuracy(rows))


def _train(setting: Setting) -> list[Any]:
    length = QUICK
    updates = length.updates(setting.tuning)
    epochs = length.tuning_epochs if setting.tuning else length.epochs
    task = MadeUp(setting.net, setting.lr, setting.momentum, length.train_samples)
    return train_task(task, setting, length, updates, epochs, "cpu")
