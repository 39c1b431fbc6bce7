"""Buffers that are no statistics stay unchanged, and gradients that overflow are never applied."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quorate
from quorate.engines.shared.buffers import Buffers
from tests.toy_tasks import Toy, mlp, plain_sgd


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("chosen", torch.tensor([True, False]))
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.ones(2)))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.net(x)
        return out


@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.Async(), quorate.SoftSync(2), quorate.Delayed(1)])
def test_masks_and_tables_are_left_alone(policy: quorate.Policy) -> None:
    result = quorate.train(Toy(Masked), policy, quorate.Simulated(4, "shifted-exp:1,1"), updates=10)
    for name in ("mask", "chosen", "turns"):
        assert torch.equal(result.parameters[name], getattr(Masked(), name))
    assert result.parameters["seen"] == 10


def _normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("policy", [quorate.Async(), quorate.SoftSync(4), quorate.Delayed(30)])
def test_running_averages_stay_near_the_data_however_stale_arrivals_are(policy: quorate.Policy) -> None:
    """If changes were added, an average that replaces a tenth would oscillate ever wider from 16 versions' delay on."""
    task = Toy(_normed, plain_sgd)
    workers = 2 if isinstance(policy, quorate.Delayed) else 60
    result = quorate.train(task, policy, quorate.Simulated(workers, "shifted-exp:1,1"), updates=400)
    data = task.train_data().tensors[0]
    mean, variance = result.parameters["0.running_mean"], result.parameters["0.running_var"]
    assert torch.allclose(mean, data.mean(0), atol=0.5)
    assert (variance > 0).all() and torch.allclose(variance, data.var(0), rtol=0.7)


def test_a_stale_running_average_is_that_of_its_batch() -> None:
    """By hand: a batch updates the newest statistics, not the statistics that its worker read."""
    model = nn.BatchNorm1d(1, momentum=0.25)
    buffers = Buffers(model)
    read = buffers.newest()
    for batch in ([1.0, 3.0], [5.0, 9.0]):
        buffers.load(read)
        model(torch.tensor(batch)[:, None])
        after = buffers.after_forward()
        flats = [buffers.flat.copy() for _ in range(2)]
        for flat, values in zip(flats, (after, read), strict=True):
            torch._foreach_copy_(flat.views, values)
        expected_mean = 0.75 * buffers.newest()[0] + 0.25 * sum(batch) / 2
        before = buffers.flat.buffer.clone()
        buffers.advance_by(*flats)
        by_flat = [one.clone() for one in buffers.newest()]
        buffers.flat.buffer.copy_(before)
        buffers.reset()
        buffers.advance([after], [1.0], [read])
        assert all(torch.allclose(one, other) for one, other in zip(by_flat, buffers.newest(), strict=True))
        assert torch.allclose(buffers.newest()[0], expected_mean)


class AlwaysOverflows(Toy):
    """A finite loss whose gradient is NaN: the root of zero."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (super().loss(model, batch) * 0).sqrt()


@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.BackupSync(3, 1), quorate.Async(), quorate.Delayed(1)])
@pytest.mark.parametrize("together", [None, True])
def test_gradients_that_are_all_nan_end_the_run(policy: quorate.Policy, together: bool | None) -> None:
    engine = quorate.Simulated(4, "shifted-exp:1,1", together=together)
    with pytest.raises(quorate.Diverged):
        quorate.train(AlwaysOverflows(), policy, engine, until="accuracy>=2")


class Huge(Toy):
    """Finite gradients so large that their sum, or their square, is not."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        large = torch.stack([parameter.mean() for parameter in model.parameters()]).sum()
        return super().loss(model, batch) * 0 + large * 3e37


@pytest.mark.parametrize(
    ("policy", "learning"),
    [
        (quorate.FullSync(), {}),
        (quorate.Async(), {"delay_compensation": 0.1}),
    ],
)
def test_what_overflows_only_when_combined_is_not_applied(policy: quorate.Policy, learning: dict[str, float]) -> None:
    task = Huge(lambda: nn.Linear(6, 1), lambda params: torch.optim.SGD(params, lr=1e-30))
    task.data = type(task.data)(task.data.tensors[0], task.data.tensors[1] * 0)
    engine = quorate.Simulated(64, "constant:1")
    try:
        result = quorate.train(task, policy, engine, updates=6, batch_size=1, **learning)
    except quorate.Diverged:
        return
    assert result.summary["tickets"]["refused"] > 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.parameters.values())


class SometimesNaN(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss + (loss * 0).sqrt() if float(batch[0][0, 0]) > 1.0 else loss


@pytest.mark.parametrize("gradients", [True, False])
def test_a_run_with_refusals_can_be_replayed(gradients: bool, tmp_path: Path) -> None:
    task = SometimesNaN(mlp, plain_sgd)
    result = quorate.train(
        task, quorate.FullSync(), quorate.Simulated(4, "shifted-exp:1,1"), epochs=3, out=tmp_path / "run"
    )
    assert result.summary["tickets"]["refused"] > 0
    assert quorate.replay(tmp_path / "run", task, gradients=gradients).gradients is gradients
