"""A noisy bowl: the smallest task on which noise, staleness and the learning rate can be set apart.

F(θ) = ½ Σ h_i θ_i², with curvatures h from 1 down to 1/50, and each sample's gradient is ∇F plus noise of one size in
every direction (the noisy quadratic model). Every curvature is there many times over, so that F of a single run is
close to its mean, and the mean is known in closed form: theory and run can be laid side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CURVATURES, STEEPEST_TO_FLATTEST, COPIES = 8, 50.0, 128
SAMPLES = 8192
#: The measure is F as a share of what it was at the start; this is what is to be reached.
TARGET = 0.01


class Bowl:
    """The bowl as a task. `noise`: variance of one sample's gradient in each direction. A sample is a batch."""

    batch_size = 1

    def __init__(self, lr: float, noise: float) -> None:
        self.lr, self._deviation = lr, math.sqrt(noise)
        self._half = torch.tensor(curvatures()).repeat_interleave(COPIES) / 2

    def model(self) -> nn.Module:
        model = nn.Module()
        model.theta = nn.Parameter((2 * self._half).rsqrt())  # every direction adds as much to F
        return model

    def train_data(self) -> TensorDataset:
        return TensorDataset(_noise())

    def loss(self, model: Any, batch: Any) -> Tensor:
        noise = batch[0].mean(0) * self._deviation
        theta: Tensor = model.theta
        return theta.dot(torch.addcmul(noise, self._half, theta))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)

    def evaluate(self, model: Any) -> dict[str, float]:
        theta = model.theta.detach()
        return {"excess": float(theta.dot(self._half * theta)) * 2 / theta.numel()}


def curvatures() -> list[float]:
    """Those that differ, steepest first."""
    return [STEEPEST_TO_FLATTEST ** (-place / (CURVATURES - 1)) for place in range(CURVATURES)]


@cache
def _noise() -> Tensor:
    """What is added to the samples' gradients, in units of its deviation; over all samples it is nothing."""
    noise = torch.randn(SAMPLES, CURVATURES * COPIES, generator=torch.Generator().manual_seed(7))
    return noise - noise.mean(0)


# ---------------------------------------------------------------- what theory says of it


def expected_updates(gradients: float, noise: float) -> float:
    """Updates until the mean of F is at the target, of SGD with the best fixed rate, `gradients` making an update.

    In a direction of curvature h, the mean of θ² follows v ← (1 − ηh)²·v + η²·noise/gradients: a geometric series.
    """
    share = noise / gradients
    coarse = min((2.0 ** (0.5 - place / 2) for place in range(40)), key=lambda rate: _updates_at(rate, share))
    finer = (min(1.99, coarse * 2.0 ** (place / 20)) for place in range(-10, 11))
    return min(_updates_at(rate, share) for rate in finer)


def _updates_at(rate: float, noise: float) -> float:
    """With this rate; inf where noise keeps F above the target."""
    shrinks = [float((1 - rate * h) ** 2) for h in curvatures()]
    # Of h·θ², which is 1 at the start for every h.
    ends = [h * rate**2 * noise / (1 - shrink) for h, shrink in zip(curvatures(), shrinks, strict=True)]

    def excess(updates: float) -> float:
        terms = (end + (1 - end) * float(shrink**updates) for end, shrink in zip(ends, shrinks, strict=True))
        return sum(terms) / CURVATURES

    if sum(ends) / CURVATURES >= TARGET:
        return math.inf
    return _crossing(lambda updates: excess(updates) <= TARGET, 1.0)


@cache
def noise_of(doubling: float) -> float:
    """The noise at which so many gradients make an update twice as many updates are needed as without noise.

    In (7) of docs/theory.md, updates ≈ S_min·(1 + B_noise/(N·B)), this number is B_noise in batches.
    """
    least = _updates_at_best_without_noise()
    return _crossing(lambda noise: expected_updates(doubling, noise) >= 2 * least, 1e-6)


@cache
def _updates_at_best_without_noise() -> float:
    return expected_updates(1.0, 0.0)


def _crossing(is_beyond: Callable[[float], bool], low: float) -> float:
    """Where a condition begins to hold, above `low`: doubled until it does, then halved."""
    high = 2 * low
    while not is_beyond(high):
        low, high = high, 2 * high
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return high
