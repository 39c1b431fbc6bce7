"""Gradients recorded as CUDA graphs: the bits of those computed call by call. Needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quorate
from quorate.learner import digest
from tests.tasks import Toy, plain_sgd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class CountsItsCalls(Toy):
    """A loss that depends on something in Python, which a recording would not see."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * (1 + self.calls % 2)


def _train(task: Any, policy: quorate.Policy, graphs: bool, **learning: Any) -> str:
    engine = quorate.Simulated(
        1 if isinstance(policy, quorate.Delayed) else 5, "shifted-exp:1,1", device="cuda", graphs=graphs
    )
    result = quorate.train(task, policy, engine, updates=60, learning=quorate.Learning(**learning))
    return digest(result.parameters)


@pytest.mark.parametrize(
    "policy",
    [
        quorate.Async(),
        quorate.Async(max_staleness=3),
        quorate.SoftSync(2),
        quorate.Delayed(4),
        quorate.BoundedStaleness(2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("learning", [{}, {"clip_norm": 0.5, "ema": 0.9}, {"delay_compensation": 0.5}], ids=repr)
def test_a_recorded_run_has_the_bits_of_a_plain_one(policy: quorate.Policy, learning: dict[str, float]) -> None:
    digests = {_train(Toy(_normed, plain_sgd), policy, graphs, **learning) for graphs in (True, False)}
    assert len(digests) == 1


def test_a_loss_that_cannot_be_recorded_is_computed_call_by_call() -> None:
    assert _train(CountsItsCalls(), quorate.Async(), True) is not None


def test_lanes_recorded_have_the_bits_of_lanes_called() -> None:
    digests = set()
    for graphs in (True, False):
        engine = quorate.Simulated(5, "shifted-exp:1,1", device="cuda", graphs=graphs, together=True)
        result = quorate.train(Toy(_normed, plain_sgd), quorate.Async(), engine, updates=60)
        assert result.metrics.header["engine"]["arithmetic"] == "abreast"
        digests.add(result.digest)
    assert len(digests) == 1
