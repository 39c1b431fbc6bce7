"""One training of the study, on the library's public interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import quorate
from experiments.common.curves import Point, train_curve
from experiments.common.made_up import pictures
from experiments.inception.settings import FULL, QUICK, Length, Trial
from quorate.tasks.inception import Cifar10Inception

LATENCY = "chen2016"
#: The learning rate at the end, as a share of that at the start; the paper's 0.94 every two epochs comes to less.
FINAL_SHARE = 0.01
#: The average of the parameters looks back so many epochs; the paper's 0.9999 is a third of one to two.
EMA_EPOCHS = 0.5
#: Global norm that async gradients are clipped to, which the paper says they need and synchronous ones do not.
CLIP_NORM = 2.0


def train(trial: Trial, data: Path | None = None, device: str = "cpu", quick: bool = False) -> list[Point]:
    """Train to the end, and measure about once an epoch."""
    length = QUICK if quick else FULL
    per_update = length.batch_size * trial.quorum
    updates = round(trial.epochs * length.train_samples / per_update)
    return train_curve(
        _task(trial, length, per_update, data, quick),
        quorate.Async() if trial.method == "async" else quorate.BackupSync(trial.quorum, trial.backups),
        quorate.Simulated(trial.workers, LATENCY, device=device),
        "accuracy",
        updates=max(1, updates),
        batch_size=length.batch_size,
        seed=trial.seed,
        learning=learning(trial, per_update, length.train_samples),
        evaluate_every=max(1, round(length.train_samples / per_update)),
    )


def _task(trial: Trial, length: Length, per_update: int, data: Path | None, quick: bool) -> Any:
    return Cifar10Inception(
        (pictures(length.train_samples), pictures(32, seed=8)) if quick else data,
        lr=trial.lr,
        decay=FINAL_SHARE ** (1 / trial.epochs),
        samples_per_update=per_update,
        width=length.width,
        precision="tf32",
    )


def learning(trial: Trial, per_update: int, samples: int) -> quorate.Learning:
    """The same average in samples, however many an update takes."""
    ema = max(0.0, 1 - per_update / (EMA_EPOCHS * samples))
    return quorate.Learning(ema=ema, clip_norm=CLIP_NORM if trial.method == "async" else None)
