"""The same workload as quorate sees it: a task, and a latency model that hands out the very same sleeps."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quorate
from benchmarks.local import workload
from quorate.latency.base import Draw


class LinearMap:
    """All workers' batches as one data set, so many times over that no epoch ends within `batches`.

    The last round of an epoch is a short one where the quorum does not divide it, and no contender has those.
    """

    batch_size = workload.BATCH

    def __init__(self, size: str, workers: int, batches: int) -> None:
        self.size, self.workers = size, workers
        self.copies = -(-batches // (workers * workload.BATCHES))

    def model(self) -> nn.Module:
        return workload.model(self.size)

    def train_data(self) -> TensorDataset:
        x, y = zip(*(workload.batches(self.size, worker) for worker in range(self.workers)), strict=True)
        return TensorDataset(*(torch.cat(part * self.copies).flatten(0, 1) for part in (x, y)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return workload.loss(model, *batch)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=workload.LEARNING_RATE)


class PeerDraws(quorate.Latency):
    """Worker w's i-th ticket takes the i-th sleep of worker w; the run's seed plays no part."""

    name: ClassVar[str] = "peer-draws"
    form: ClassVar[str] = "peer-draws:CASE"
    example: ClassVar[str] = "peer-draws:b"

    def __init__(self, case: str, steps: int) -> None:
        self.case, self.steps = case, steps

    def sampler(self, seed: int, workers: int) -> Draw:
        table = [workload.sleeps(self.case, worker, self.steps).tolist() for worker in range(workers)]
        return lambda worker, step, _row, _time_s: table[worker][step % self.steps]

    def text(self) -> str:
        return f"{self.name}:{self.case}"

    def mean(self) -> None:
        """None: the table is what is drawn, and it is finite."""

    def longest(self) -> float:
        return 1.0
