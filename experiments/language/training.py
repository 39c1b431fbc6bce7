"""One training of the study, on the library's public interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments.common.curves import Point
from experiments.common.race import TUNING_SEED, Trial
from experiments.language.settings import FULL, QUICK
from quorate.tasks.charlm import TEST_SHARE, CharLm, load_shakespeare

#: For quick runs, where nothing may be fetched.
MADE_UP = "the first of many, and the last of few; " * 100


def train(trial: Trial, data: Path | None = None, device: str = "cpu", quick: bool = False) -> list[Point]:
    """Train to the end."""
    race = QUICK if quick else FULL
    torch.set_num_threads(1)
    small: dict[str, Any] = {"context": 8, "width": 8, "layers": 1, "heads": 2, "test_samples": 8} if quick else {}
    task = CharLm(text=MADE_UP if quick else text_of(trial, data), lr=trial.lr, updates=race.updates(trial), **small)
    return race.train(trial, task, device)


def text_of(trial: Trial, data: Path | None) -> str:
    """The text; for the tuning without its last tenth, which is the test, so that it is judged by other text."""
    text = load_shakespeare(data)
    return text[: round(len(text) * (1 - TEST_SHARE))] if trial.seed == TUNING_SEED else text
