"""Odd models, and gradients that are not finite: a run has the bits of its replay, which computes in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quorate
from tests.toy_tasks import Toy, adam, batch_norm_net, plain_sgd, sgd

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(60)]
POLICIES = [
    quorate.BackupSync(2, 1),
    quorate.BackupSync(2, 1, late="finish"),
    quorate.SoftSync(2, staleness_weights=True),
    quorate.Delayed(2),
]


class Odd(nn.Module):
    """Parameters of no, one and many elements in three precisions, some still, some unused; buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(6, 16), nn.Linear(3, 3)
        self.none, self.scale = nn.Parameter(torch.ones(0)), nn.Parameter(torch.tensor(1.3))
        self.still = nn.Parameter(torch.randn(16), requires_grad=False)
        self.exact = nn.Parameter(torch.randn(16, 3, dtype=torch.float64))
        self.rough = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool))
        self.register_buffer("endless", torch.full((2,), -math.inf))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mask[int(self.count) % 16] ^= True
            self.mean += x.mean().detach()
        hidden = functional.relu(self.first(x)) * self.scale + self.still * self.mask
        return (hidden.double() @ self.exact).float() + self.rough.float()


class Branching(nn.Module):
    """Which of its layers are used depends on the batch, so gradients are missing here and there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum().item()
        result: Tensor = self.layers[0 if total < -3 else 1 if total < 3 else 2](x)
        return result


class Rooted(nn.Module):
    """Finite losses whose gradient is not, for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x))
        return y + torch.sqrt(y.relu() * 0) if x.sum().item() > 6 else y


class Undefined(Toy):
    """A loss that is NaN for some batches, always."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * math.nan if batch[0].sum().item() > 6 else loss


TASKS: dict[str, Callable[[], Toy]] = {
    "odd": lambda: Toy(Odd, adam),
    "odd, plain SGD": lambda: Toy(Odd, plain_sgd),
    "branching": lambda: Toy(Branching, adam),
    "branching, plain SGD": lambda: Toy(Branching, plain_sgd),
    "not finite": lambda: Toy(Rooted, sgd),
    "not finite, plain SGD": lambda: Toy(Rooted, plain_sgd),
    "undefined": lambda: Undefined(batch_norm_net),
}


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("name", TASKS)
def test_the_bits_of_a_replay(tmp_path: Path, name: str, policy: quorate.Policy) -> None:
    task, learning = TASKS[name](), {"ema": 0.9, "clip_norm": None if "plain" in name else 0.5}
    engine = quorate.Local(3, latency="shifted-exp:0.0003,0.0006")
    result = quorate.train(task, policy, engine, epochs=2, out=tmp_path / "run", **learning)
    replayed = quorate.replay(tmp_path / "run", task).result
    assert replayed.digest == result.digest
    assert result.averaged is not None and replayed.averaged is not None
    assert all(torch.equal(result.averaged[key], replayed.averaged[key]) for key in result.averaged)
    assert all(bool(torch.isfinite(tensor).all()) for key, tensor in result.parameters.items() if key != "endless")
    refused = result.summary["tickets"]["reasons"].get("its gradient held NaN or Inf", 0)
    assert (refused > 0) == (name.startswith(("not finite", "undefined")))


def test_a_run_that_can_only_diverge_says_so() -> None:
    with pytest.raises(quorate.Diverged, match="NaN or Inf"):
        quorate.train(Hopeless(), quorate.FullSync(), quorate.Local(2), updates=1000)


class Hopeless(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * math.inf
