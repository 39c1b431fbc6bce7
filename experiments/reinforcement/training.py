"""One training of the study, on the library's public interface."""

from __future__ import annotations

import torch

from experiments.common.curves import Point
from experiments.common.race import Trial
from experiments.reinforcement.settings import EPISODES, FULL, QUICK
from quorate.tasks.cartpole import MOST_STEPS, CartPole


def train(trial: Trial, quick: bool = False) -> list[Point]:
    """Train to the end."""
    torch.set_num_threads(1)
    task = CartPole(lr=trial.lr, steps=30 if quick else MOST_STEPS, test_episodes=4 if quick else 100)
    return (QUICK if quick else FULL).train(trial, task, "cpu", batch_size=EPISODES)
