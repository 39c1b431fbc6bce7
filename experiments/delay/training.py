"""One training of the study, on the library's public interface, as rows of a table."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quorate
from experiments.common.curves import Point, train_curve
from experiments.common.made_up import pictures
from experiments.delay.rows import GUESSING, Row, Setting
from experiments.delay.settings import FULL, QUICK, WARM_UP_SHARE, WORKERS, Length
from quorate.tasks.cifar10 import Cifar10, alexnet, googlenet
from quorate.tasks.images import accuracy_and_loss


def train(setting: Setting, data: Path | None, device: str, quick: bool) -> list[Row]:
    """Train to the end, and measure about once an epoch."""
    length = QUICK if quick else FULL[setting.net]
    if quick:
        return train_task(MadeUp(setting, length.train_samples), setting, length, device)
    task = Cifar10(
        setting.net,
        data,
        lr=setting.lr,
        momentum=setting.momentum,
        updates=length.updates(setting.tuning),
        precision="tf32",
        train_samples=length.train_samples,
        test_samples=length.test_samples,
    )
    return train_task(task, setting, length, device)


def train_task(task: Any, setting: Setting, length: Length, device: str) -> list[Row]:
    """The same for any task."""
    updates = length.updates(setting.tuning)
    epochs = length.tuning_epochs if setting.tuning else length.epochs
    points = train_curve(
        task,
        policy_of(setting, updates),
        quorate.Simulated(WORKERS, device=device),
        "accuracy",
        updates=updates,
        batch_size=length.batch_size,
        seed=setting.seed,
        delay_compensation=setting.compensation or None,
        evaluate_every=max(1, updates // epochs),
    )
    return [_row(point, point.update * epochs / updates) for point in points]


def policy_of(setting: Setting, updates: int) -> quorate.Policy:
    """The delay, or one that grows to it over the first quarter of the training."""
    warm_up = round(updates * WARM_UP_SHARE) if setting.repair == "warm-up" else 0
    return quorate.Delayed(setting.delay, warm_up=warm_up)


def _row(point: Point, epoch: float) -> Row:
    if math.isnan(point.measure):  # it diverged before anything was measured
        return Row(0.0, 0, GUESSING, math.log(10), point.diverged)
    return Row(round(epoch, 3), point.update, point.measure, point.loss, point.diverged)


_TINY = {"alexnet": partial(alexnet, width=0.1, dense=16), "googlenet": partial(googlenet, width=0.1, batch_norm=True)}


class MadeUp(quorate.Task):
    """For a quick run: made-up pictures and tiny nets. Its numbers mean nothing; its path is the same."""

    def __init__(self, setting: Setting, samples: int) -> None:
        self._setting = setting
        images, labels = pictures(samples).tensors
        self._data = TensorDataset((images.float() - 100) / 30, labels)

    def model(self) -> nn.Module:
        return _TINY[self._setting.net]()

    def train_data(self) -> TensorDataset:
        return self._data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self._setting.lr, momentum=self._setting.momentum, nesterov=True)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return accuracy_and_loss(model, *self._data.tensors)
