"""Small tasks that tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from quorate.ledger import Ledger


def toy_data(samples: int, inputs: int = 6, classes: int = 3) -> TensorDataset:
    """A learnable classification problem."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(samples, inputs, generator=draws)
    teacher = torch.randn(inputs, classes, generator=draws)
    return TensorDataset(x, (x @ teacher).argmax(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch_norm_net() -> nn.Module:
    """Two of them, so that their statistics and their counters do not simply follow each other."""
    norms = nn.BatchNorm1d(16), nn.BatchNorm1d(12)
    return nn.Sequential(nn.Linear(6, 16), norms[0], nn.ReLU(), nn.Linear(16, 12), norms[1], nn.Linear(12, 3))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def sgd_of_others(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.05)


def sgd_partly_of_others(params: Any) -> torch.optim.Optimizer:
    others = nn.Linear(3, 3).parameters()
    return torch.optim.SGD([{"params": params}, {"params": others, "lr": 0.1}], lr=0.05)


class Toy:
    """A task made of parts."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = mlp,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        samples: int = 100,
        batch_size: int = 8,
        schedule: Callable[[Any], Any] | None = None,
    ) -> None:
        self.make, self.make_optimizer, self.batch_size = make, optimizer, batch_size
        self.data = toy_data(samples)
        if schedule is not None:
            self.schedule = schedule

    def model(self) -> nn.Module:
        return self.make()

    def train_data(self) -> Any:
        return self.data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return self.make_optimizer(params)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        x, y = (tensor.to(device) for tensor in self.data.tensors)
        return {"accuracy": float((model(x).argmax(1) == y).float().mean())}


class Broken(Toy):
    """A task with a bug."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("in the user's loss")


def plain_loop(task: Any, updates: int, seed: int) -> dict[str, Tensor]:
    """What a PyTorch user writes: the same model, the same order of samples, one process."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    schedule = task.schedule(optimizer) if hasattr(task, "schedule") else None
    data = task.train_data()
    order = Ledger(len(data), task.batch_size, seed=seed)
    for update in range(updates):
        rows = [data[index] for index in order.indices(update)]
        batch = [torch.stack(column) for column in zip(*rows, strict=True)]
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model.state_dict()
