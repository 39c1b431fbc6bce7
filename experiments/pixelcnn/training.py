"""One training of the study, on the library's public interface; one of them leaves a picture of samples."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.common.curves import Point
from experiments.common.made_up import pictures
from experiments.common.race import TUNING_SEED, Trial
from experiments.pixelcnn.picture import as_grid, write_png
from experiments.pixelcnn.settings import CLIP_NORM, DRAWN, FULL, LEFT, QUICK, SLOW
from quorate.tasks.cifar10 import load_cifar10
from quorate.tasks.pixelcnn import PixelCnn, sample

SAMPLES = "samples.png"
_ROWS, _COLUMNS, _SCALE = 4, 12, 3
_HELD_BACK = 1000


class _Kept(PixelCnn):
    """Keeps a copy of the model that was measured last: the trained one, with averaged parameters."""

    last: nn.Module | None = None

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.last = deepcopy(model)
        return super().evaluate(model)


class _Slow(_Kept):
    """The paper's slow decay: after the warm-up the rate falls exponentially, over all of the training."""

    def share_of_lr(self, version: int) -> float:
        assert self.updates is not None, "a training has its length"
        return super().share_of_lr(version) * self.final_share ** (version / self.updates)


def train(
    trial: Trial, folder: Path, data: Path | None = None, device: str = "cpu", quick: bool = False
) -> list[Point]:
    """Train to the end; samples of 15+1 (its first seed in the shortest time, at its tuned rate) go into the folder."""
    race = QUICK if quick else FULL
    torch.set_num_threads(1)
    size: dict[str, Any] = {"channels": 6, "layers": 1, "mixtures": 2} if quick else {}
    slow = trial.protocol == SLOW
    options: dict[str, Any] = {"drop_share": 1.0, "final_share": LEFT} if slow else {}
    task = (_Slow if slow else _Kept)(
        (pictures(128, size=8), pictures(16, size=8, seed=8)) if quick else data_of(trial, data),
        lr=trial.lr,
        updates=race.updates(trial),
        precision="tf32",
        test_samples=16 if quick else 500,
        **size,
        **options,
    )
    points = race.train(trial, task, device, **({"clip_norm": CLIP_NORM} if slow else {}))
    file = folder / SAMPLES
    drawn = replace(trial, method=DRAWN, seed=race.seeds[0], seconds=race.shorter()[-1])
    if trial == drawn and not file.exists():
        assert task.last is not None, "a training is measured at its end"
        draw_samples(task.last, file, 8 if quick else 32)
    return points


def data_of(trial: Trial, data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """What to train with and to measure with: the tuning never sees test pictures, but training pictures held back."""
    train, test = load_cifar10(data)
    if trial.seed != TUNING_SEED:
        return train, test
    kept, held_back = train.tensors[0][:-_HELD_BACK], train.tensors[0][-_HELD_BACK:]
    return TensorDataset(kept), TensorDataset(held_back)


def draw_samples(model: nn.Module, file: Path, size: int) -> None:
    """Samples side by side, each pixel several times as large."""
    torch.manual_seed(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_png(file, as_grid(sample(model.eval(), _ROWS * _COLUMNS, size).cpu(), _COLUMNS, _SCALE))
