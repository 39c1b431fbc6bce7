"""One training of the study, on the library's public interface, as rows of a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import quorate
from experiments.delay.settings import WARM_UP_SHARE, WORKERS, Length, Setting
from quorate.tasks.cifar10 import Cifar10

#: The accuracy of whoever knows nothing of ten kinds.
GUESSING = 0.1


class Row(NamedTuple):
    """What a version of a training was like on the test data. `diverged`: nothing finite came after it."""

    net: str
    delay: int
    repair: str
    momentum: float
    compensation: float
    lr: float
    seed: int
    epoch: float
    update: int
    accuracy: float
    test_loss: float
    diverged: int


def train(setting: Setting, length: Length, data: Path | None, device: str, precision: str) -> list[Row]:
    """Train to the end, and measure about once an epoch."""
    updates = length.updates(setting.tuning)
    epochs = length.tuning_epochs if setting.tuning else length.epochs
    task = Cifar10(
        setting.net,
        data,
        lr=setting.lr,
        momentum=setting.momentum,
        updates=updates,
        precision=precision,
        train_samples=length.train_samples,
        test_samples=length.test_samples,
    )
    return train_task(task, setting, length, updates, epochs, device)


def train_task(
    task: quorate.Task, setting: Setting, length: Length, updates: int, epochs: int, device: str
) -> list[Row]:
    rows: list[Row] = []

    class Rows(quorate.Recorder):
        def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
            rows.append(_row(setting, version, version * epochs / updates, measures))

    try:
        quorate.train(
            task,
            policy_of(setting, updates),
            quorate.Simulated(WORKERS, device=device),
            updates=updates,
            batch_size=length.batch_size,
            seed=setting.seed,
            learning=quorate.Learning(delay_compensation=setting.compensation or None),
            evaluate_every=max(1, updates // epochs),
            recorders=(Rows(),),
        )
    except quorate.Diverged:
        last = rows.pop() if rows else _row(setting, 0, 0.0, {"accuracy": GUESSING, "test_loss": math.log(10)})
        return [*rows, last._replace(diverged=1)]
    return rows


def policy_of(setting: Setting, updates: int) -> quorate.Policy:
    """The delay, or one that grows to it over the first quarter of the training."""
    warm_up = round(updates * WARM_UP_SHARE) if setting.repair == "warm-up" else 0
    return quorate.Delayed(setting.delay, warm_up=warm_up)


def _row(setting: Setting, version: int, epoch: float, measures: dict[str, float]) -> Row:
    return Row(
        setting.net,
        setting.delay,
        setting.repair,
        setting.momentum,
        setting.compensation,
        setting.lr,
        setting.seed,
        round(epoch, 3),
        version,
        measures["accuracy"],
        round(measures["test_loss"], 5),
        0,
    )
