"""The workload that every contender runs: an MLP learns a linear map; a worker sleeps, then computes one gradient.

Seeds, nets, batches and sleeps are those of the peers' sweep, bit for bit, so figures can stand beside its figures.
torch is imported where it is used, since some environments of `benchmarks.peers` have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SEED = 20240607
WIDTHS = {
    "0.1M": [256, 256, 128, 10],
    "5M": [512, 1536, 1536, 1152, 10],
    "25M": [1024, 3072, 3072, 4096, 10],
}
CASES = {"a": "no sleep", "b": "50 ms + Exp(25 ms)", "c": "50 ms, 4 % chance of 500 ms"}
BATCH = 16  # samples
BATCHES = 32  # of each worker; it goes through them again and again
LEARNING_RATE = 0.01


# ---------------------------------------------------------------- sleeps


def sleeps(case: str, worker: int, steps: int) -> NDArray[np.float64]:
    """Seconds [steps] that the worker sleeps before each of its gradients. More steps go on, they change nothing."""
    draws = np.random.default_rng([SEED, worker])
    if case == "a":
        return np.zeros(steps)
    if case == "b":
        return 0.050 + draws.exponential(0.025, steps)
    assert case == "c"
    return np.where(draws.random(steps) < 0.04, 0.500, 0.050)


def most_updates_per_s(case: str, workers: int, quorum: int, first: int, last: int) -> float | None:
    """The rate if all but sleeping were free and the late interrupted; None where nobody sleeps.

    A round then takes the quorum-th smallest of its sleeps; the mean is over rounds first … last-1.
    """
    if case == "a":
        return None
    rounds = np.stack([sleeps(case, worker, last)[first:] for worker in range(workers)])
    return 1.0 / float(np.sort(rounds, axis=0)[quorum - 1].mean())


# ---------------------------------------------------------------- net and data


def model(size: str) -> nn.Module:
    """The net, with its parameters drawn from torch's current random state."""
    from torch import nn

    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS[size]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def parameter_bytes(size: str) -> int:
    return sum(4 * (before + 1) * after for before, after in pairwise(WIDTHS[size]))


def batches(size: str, worker: int) -> tuple[Tensor, Tensor]:
    """The worker's inputs [BATCHES, BATCH, in] and targets [BATCHES, BATCH, 10]."""
    import torch

    inside, outside = WIDTHS[size][0], WIDTHS[size][-1]
    teacher = np.random.default_rng(SEED).standard_normal((inside, outside)) / np.sqrt(inside)
    x = np.random.default_rng([SEED + 1, worker]).standard_normal((BATCHES, BATCH, inside)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(x @ teacher.astype(np.float32))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    error: Tensor = model(x) - y
    return (error**2).mean()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


class Worker:
    """A worker of the contenders that need one written out: DDP and the floor."""

    def __init__(self, size: str, case: str, worker: int, steps: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.model = model(size)
        self._x, self._y = batches(size, worker)
        self._sleeps = sleeps(case, worker, steps).tolist()
        self._step = 0

    def sleep(self, wait: Callable[[float], object] = time.sleep) -> object:
        """Sleep this step's time; `wait` may be something that can be interrupted, and says so."""
        seconds = self._sleeps[self._step]
        self._step += 1
        return wait(seconds) if seconds > 0 else None

    def compute(self) -> Tensor:
        """Forward and backward of the step's batch; gives the loss, leaves the gradient in .grad."""
        batch = (self._step - 1) % BATCHES
        for parameter in self.model.parameters():
            parameter.grad = None
        found = loss(self.model, self._x[batch], self._y[batch])
        found.backward()
        return found
