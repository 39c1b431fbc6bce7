"""One training of the study, on the library's public interface."""

from __future__ import annotations

from pathlib import Path

import torch

import quorate
from experiments.common.curves import Point, train_curve
from experiments.common.made_up import pictures
from experiments.staleness.settings import FULL, QUICK, RAMP_SHARE, Trial
from quorate.tasks.mnist import CHANNELS, Mnist


def train(trial: Trial, data: Path | None = None, device: str = "cpu", quick: bool = False) -> list[Point]:
    """Train to the end, and measure once an epoch; one that tunes, with pictures that are held out."""
    torch.set_num_threads(1)  # a net this small is slower with more, and trials run side by side
    length = QUICK if quick else FULL
    held_out = length.held_out if trial.is_tuning else 0
    updates = length.updates(trial.epochs, held_out)
    task = Mnist(
        (_pictures(length.samples, 7), _pictures(64, 8)) if quick else data,
        lr=trial.lr,
        updates=updates,
        held_out=held_out,
        channels=length.channels or CHANNELS,
        precision="tf32",
    )
    return train_curve(
        task,
        policy_of(trial, updates),
        quorate.Simulated(1, device=device),
        "error",
        updates=updates,
        batch_size=length.batch_size,
        seed=trial.seed,
        ema=trial.ema,
        clip_norm=trial.clip or None,
        evaluate_every=updates // trial.epochs,
    )


def policy_of(trial: Trial, updates: int) -> quorate.Policy:
    """One worker whose gradients are all used so many updates late."""
    return quorate.Delayed(trial.staleness, warm_up=round(RAMP_SHARE * updates) if trial.ramp else 0)


def _pictures(samples: int, seed: int) -> torch.utils.data.TensorDataset:
    return pictures(samples, channels=1, size=28, seed=seed)
