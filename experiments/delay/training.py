"""One training of the study, on the library's public interface, as rows of a table."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quorate
from experiments.common.curves import Point, train_curve
from experiments.common.made_up import pictures
from experiments.delay import tiny_imagenet
from experiments.delay.held_out import CIFAR, DATA_SETS, QUICK_HELD_OUT, Trial, length_of, split
from experiments.delay.rows import Row, Setting
from experiments.delay.settings import FULL, QUICK, WARM_UP_SHARE, WORKERS, Length
from quorate.tasks.cifar10 import Cifar10, alexnet, googlenet, load_cifar10
from quorate.tasks.images import accuracy_and_loss, use_precision


def train(setting: Setting, data: Path | None, device: str, quick: bool) -> list[Row]:
    """Train to the end, and measure about once an epoch."""
    length = QUICK if quick else FULL[setting.net]
    if quick:
        made_up = _made_up(length.train_samples)
        return train_task(MadeUp(setting, made_up, made_up), setting, length, device)
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


def train_held_out(trial: Trial, data: Path | None, device: str, quick: bool) -> list[Row]:
    """The same in the second protocol: a trial of the tuning is measured with pictures that are held out."""
    length = length_of(trial.data, trial.net, quick)
    kept, measured = parts_of(trial, data, quick)
    if quick:
        task: quorate.Task = MadeUp(trial, kept, measured)
    else:
        task = _Pictures(
            trial.net,
            (kept, measured),
            classes=DATA_SETS[trial.data].classes,
            lr=trial.lr,
            momentum=trial.momentum,
            updates=length.updates(trial.tuning),
            precision="tf32",
        )
    return train_task(task, trial, length, device, clip_norm=trial.clip or None)


def parts_of(trial: Trial, data: Path | None, quick: bool) -> tuple[TensorDataset, TensorDataset]:
    """What to train with, and what to measure with: held-out pictures, or the test set once the rate is chosen."""
    kept, held_out, test = _parts(trial.data, data, quick)
    return kept, held_out if trial.tuning else test


@cache
def _parts(name: str, data: Path | None, quick: bool) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    load = load_cifar10 if name == CIFAR else tiny_imagenet.load
    train, test = (_made_up(QUICK.train_samples), _made_up(16, seed=8)) if quick else load(data)
    return *split(train, QUICK_HELD_OUT if quick else DATA_SETS[name].held_out), test


def train_task(task: Any, setting: Setting, length: Length, device: str, clip_norm: float | None = None) -> list[Row]:
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
        clip_norm=clip_norm,
        evaluate_every=max(1, updates // epochs),
    )
    return [_row(point, point.update * epochs / updates, setting.guessing) for point in points]


def policy_of(setting: Setting, updates: int) -> quorate.Policy:
    """The delay, or one that grows to it over the first quarter of the training."""
    warm_up = round(updates * WARM_UP_SHARE) if setting.repair == "warm-up" else 0
    return quorate.Delayed(setting.delay, warm_up=warm_up)


def _row(point: Point, epoch: float, guessing: float) -> Row:
    if math.isnan(point.measure):  # it diverged before anything was measured
        return Row(0.0, 0, guessing, math.log(1 / guessing), point.diverged)
    return Row(round(epoch, 3), point.update, point.measure, point.loss, point.diverged)


class _Pictures(Cifar10):
    """The same nets with as many scores as the pictures have classes."""

    def __init__(self, *given: Any, classes: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self._classes = classes

    def model(self) -> nn.Module:
        use_precision(self.precision)
        return net_of(self.net, self._classes)


def net_of(net: str, classes: int = 10) -> nn.Module:
    """A net of the study."""
    return alexnet(classes) if net == "alexnet" else googlenet(classes, batch_norm=True)


def _made_up(samples: int, seed: int = 7) -> TensorDataset:
    images, labels = pictures(samples, seed=seed).tensors
    return TensorDataset((images.float() - 100) / 30, labels)


_TINY = {"alexnet": partial(alexnet, width=0.1, dense=16), "googlenet": partial(googlenet, width=0.1, batch_norm=True)}


class MadeUp(quorate.Task):
    """For a quick run: made-up pictures and tiny nets. Its numbers mean nothing; its path is the same."""

    def __init__(self, setting: Setting, train: TensorDataset, measured: TensorDataset) -> None:
        self._setting, self._data, self._measured = setting, train, measured

    def model(self) -> nn.Module:
        return _TINY[self._setting.net]()

    def train_data(self) -> TensorDataset:
        return self._data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self._setting.lr, momentum=self._setting.momentum, nesterov=True)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return accuracy_and_loss(model, *self._measured.tensors)
