"""One training of the study, on the library's public interface."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import TensorDataset

import quorate
from experiments.common.curves import Point, train_curve
from experiments.common.made_up import pictures as made_up
from experiments.inception.settings import FULL, LATENCY, QUICK, Length, Trial
from quorate.tasks.cifar10 import Cifar10Inception, load_cifar10

#: The learning rate at the end, as a share of that at the start; the paper's 0.94 every two epochs comes to less.
FINAL_SHARE = 0.01
#: Updates between measurements of a training that stops early.
EARLY_EVERY = 4


def train(trial: Trial, data: Path | None = None, device: str = "cpu", quick: bool = False) -> list[Point]:
    """Train to the end, and measure about once an epoch; a training that stops early every few updates."""
    length = QUICK if quick else FULL
    per_update = length.batch_size * trial.quorum
    pictures = _pictures(trial, length, data, quick)
    samples = len(pictures[0])
    updates = round((trial.stop or trial.epochs) * samples / per_update)
    return train_curve(
        Cifar10Inception(
            pictures,
            lr=trial.lr,
            decay=FINAL_SHARE ** (1 / trial.epochs),
            samples_per_update=per_update,
            width=length.width,
            precision="tf32",
        ),
        quorate.Async() if trial.method == "async" else quorate.BackupSync(trial.quorum, trial.backups),
        quorate.Simulated(trial.workers, LATENCY, device=device),
        "accuracy",
        updates=max(1, updates),
        batch_size=length.batch_size,
        seed=trial.seed,
        **learning(trial, per_update, samples),
        evaluate_every=EARLY_EVERY if trial.stop else max(1, round(samples / per_update)),
    )


def _pictures(trial: Trial, length: Length, data: Path | None, quick: bool) -> tuple[TensorDataset, TensorDataset]:
    """What to train with and to measure with: the tuning never sees test pictures, but training pictures held back."""
    train, test = (made_up(length.train_samples), made_up(32, seed=8)) if quick else load_cifar10(data)
    if not trial.is_tuning:
        return train, test
    cut = len(train) - length.held_back
    first, last = (TensorDataset(*(one[part] for one in train.tensors)) for part in (slice(cut), slice(cut, None)))
    return first, last


def learning(trial: Trial, per_update: int, samples: int) -> dict[str, float | None]:
    """The same average in samples, however many an update takes."""
    ema = max(0.0, 1 - per_update / (trial.average * samples)) if trial.average else None
    return {"ema": ema, "clip_norm": trial.clip or None}
