"""An 18-layer net on the digits, as a task of the library and as a net whose layers are read and written one by one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.layers.profiles import LAYERS
from quorate.ledger import Ledger
from quorate.task import BoundTask
from quorate.tasks.digits import Digits

#: Of a layer's output before it is added: 16 of them together then change a picture about as much as one would.
ADDED = 1 / math.sqrt(LAYERS - 2)


class Added(nn.Module):
    """A dense layer whose output is added to its input: without that, 18 plain layers hardly train at all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, width] to [n, width]."""
        return hidden + ADDED * functional.relu(self.dense(hidden))


class DeepDigits(Digits):
    """The digits with 18 dense layers and plain SGD; its rate falls to nothing over the second half."""

    def __init__(self, lr: float = 0.02, updates: int = 1500, width: int = 32) -> None:
        super().__init__(lr=lr, momentum=0.0)
        self.updates, self.width = updates, width

    def model(self) -> nn.Sequential:
        first = nn.Sequential(nn.Flatten(), nn.Linear(64, self.width), nn.ReLU())
        middle = [Added(self.width) for _ in range(LAYERS - 2)]
        return nn.Sequential(first, *middle, nn.Linear(self.width, 10))

    def factor(self, version: int) -> float:
        """Of the rate, after so many updates."""
        return max(0.0, min(1.0, 2 * (1 - version / self.updates)))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)


class Diverged(Exception):  # noqa: N818 - as the library's own
    """A gradient held NaN or Inf."""


class DeepNet:
    """`Net` of the simulator for DeepDigits: the same start, batches and arithmetic as the library's engines have."""

    def __init__(self, task: DeepDigits, seed: int) -> None:
        self._bound = BoundTask(task)
        self._ledger = Ledger(self._bound.samples(), self._bound.batch_size, seed=seed)
        self.model = self._bound.model(seed, torch.device("cpu"))
        self._task, self._seed = task, seed
        assert isinstance(self.model, nn.Sequential)
        self._layers = [list(layer.parameters()) for layer in self.model]
        self._all = [parameter for layer in self._layers for parameter in layer]
        self._newest = [[parameter.detach().clone() for parameter in layer] for layer in self._layers]
        self._versions = [0] * len(self._layers)

    def read(self, layer: int) -> list[Tensor]:
        """A write makes new tensors, so what was read stays as it is."""
        return self._newest[layer]

    def gradients(self, number: int, parameters: list[list[Tensor]]) -> list[list[Tensor]]:
        """Forward and backward at what was read."""
        self._point_at(parameters)
        batch: Any = self._bound.batch(torch.tensor(self._ledger.indices(number)), torch.device("cpu"))
        loss = self._bound.loss(self.model, batch)
        if not math.isfinite(float(loss.detach())):
            raise Diverged
        found = iter(torch.autograd.grad(loss, self._all))
        return [[next(found) for _ in layer] for layer in self._layers]

    def write(self, layer: int, gradient: list[Tensor]) -> None:
        """One step of plain SGD; the rate follows the layer's version."""
        rate = self._task.lr * self._task.factor(self._versions[layer])
        self._versions[layer] += 1
        self._newest[layer] = [
            torch.add(old, change, alpha=-rate) for old, change in zip(self._newest[layer], gradient, strict=True)
        ]

    def evaluate(self) -> dict[str, float]:
        """The task's measures of the newest parameters of every layer."""
        self._point_at(self._newest)
        return self._bound.evaluate(self.model, self._seed)

    def parameters(self) -> dict[str, Tensor]:
        """The newest parameters by name."""
        self._point_at(self._newest)
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def _point_at(self, parameters: list[list[Tensor]]) -> None:
        for layer, tensors in zip(self._layers, parameters, strict=True):
            for parameter, tensor in zip(layer, tensors, strict=True):
                parameter.data = tensor
