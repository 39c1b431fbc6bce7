"""One training of the study, on the library's public interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from experiments.common.curves import Point
from experiments.common.made_up import pictures
from experiments.common.race import TUNING_SEED, Trial
from experiments.pixelcnn.settings import CLIP_NORM, FULL, LEFT, QUICK, SLOW
from quorate.tasks.cifar10 import load_cifar10
from quorate.tasks.pixelcnn import PixelCnn

_HELD_BACK = 1000


class _Slow(PixelCnn):
    """The paper's slow decay: after the warm-up the rate falls exponentially, over all of the training."""

    def share_of_lr(self, version: int) -> float:
        assert self.updates is not None, "a training has its length"
        return super().share_of_lr(version) * self.final_share ** (version / self.updates)


def train(trial: Trial, data: Path | None = None, device: str = "cpu", quick: bool = False) -> list[Point]:
    """Train to the end."""
    race = QUICK if quick else FULL
    torch.set_num_threads(1)
    size: dict[str, Any] = {"channels": 6, "layers": 1, "mixtures": 2} if quick else {}
    slow = trial.protocol == SLOW
    options: dict[str, Any] = {"drop_share": 1.0, "final_share": LEFT} if slow else {}
    task = (_Slow if slow else PixelCnn)(
        (pictures(128, size=8), pictures(16, size=8, seed=8)) if quick else data_of(trial, data),
        lr=trial.lr,
        updates=race.updates(trial),
        precision="tf32",
        test_samples=16 if quick else 500,
        **size,
        **options,
    )
    return race.train(trial, task, device, **({"clip_norm": CLIP_NORM} if slow else {}))


def data_of(trial: Trial, data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """What to train with and to measure with: the tuning never sees test pictures, but training pictures held back."""
    train, test = load_cifar10(data)
    if trial.seed != TUNING_SEED:
        return train, test
    kept, held_back = train.tensors[0][:-_HELD_BACK], train.tensors[0][-_HELD_BACK:]
    return TensorDataset(kept), TensorDataset(held_back)
