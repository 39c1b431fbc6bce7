"""What every contender trains: a net, fixed random pictures, SGD with momentum, one thread a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.network.elsewhere import computed_elsewhere
from quorate.tasks.cifar10 import alexnet, googlenet

SEED = 20240611
BATCHES = 4  # of each host; it goes through them again and again
LEARNING_RATE = 1e-3  # small, so that no contender meets infinities, which are computed at another speed
CLASSES = 10


class Net(NamedTuple):
    build: Callable[[], nn.Module]
    batch: int  # pictures a host computes in an iteration
    what: str


NETS = {
    "alexnet": Net(alexnet, 32, "AlexNet-like: five convolutions, then heavy dense layers"),
    "googlenet": Net(googlenet, 10, "GoogLeNet-like: eight inception blocks, parameters spread over 50 layers"),
    "alexnet25m": Net(lambda: alexnet(dense=4288), 16, "AlexNet-like with dense layers of 4,288 units: 25M parameters"),
}


def model(net: str, elsewhere: bool = False) -> nn.Module:
    """The same on every host. elsewhere: as if an accelerator computed it."""
    torch.manual_seed(SEED)
    built = NETS[net].build()
    return computed_elsewhere(built, torch.zeros(1, 3, 32, 32)) if elsewhere else built


def parameter_bytes(net: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() * parameter.element_size() for parameter in NETS[net].build().parameters())


def pictures(net: str, host: int) -> list[tuple[Tensor, Tensor]]:
    """The host's batches: pictures [batch, 3, 32, 32] and classes [batch]."""
    draws = torch.Generator().manual_seed(SEED + 1 + host)
    batch = NETS[net].batch
    return [
        (torch.randn(batch, 3, 32, 32, generator=draws), torch.randint(CLASSES, (batch,), generator=draws))
        for _ in range(BATCHES)
    ]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
