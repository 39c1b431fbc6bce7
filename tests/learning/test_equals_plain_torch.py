"""FullSync equals a plain PyTorch loop: bitwise with one worker, within tolerance with eight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import quorate
from quorate.engines.simulated.batchnorm import batch_norm_per_group
from quorate.ledger import Ledger
from quorate.task import BoundTask
from quorate.tasks.digits import Digits
from tests.toy_tasks import Toy, adam, batch_norm_net, mlp, plain_loop, sgd


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)


def batch_norm_without_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Linear(16, 3))


def conv_net_with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 8, 3, padding=1),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


TASKS = {
    "sgd-momentum": lambda: Toy(mlp, sgd),
    "adam": lambda: Toy(mlp, adam),
    "batch-norm": lambda: Toy(batch_norm_net, sgd),
    "conv-batch-norm-adamw": lambda: Toy(conv_net_with_batch_norm, adamw),
    "schedule": lambda: Toy(mlp, sgd, schedule=cosine),
    "digits": Digits,
}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), f"{name} differs by {(ours[name] - tensor).abs().max()}"


@pytest.mark.parametrize("name", TASKS)
def test_one_worker_equals_a_plain_loop_bit_for_bit(name: str) -> None:
    task = TASKS[name]()
    result = quorate.train(task, quorate.FullSync(), quorate.Simulated(1), updates=200, seed=3)
    assert_same_bits(result.parameters, plain_loop(task, 200, seed=3))


@pytest.mark.parametrize(
    "policy",
    [quorate.Async(), quorate.SoftSync(1), quorate.Delayed(0), quorate.KBatchSync(1), quorate.BoundedStaleness(2)],
    ids=repr,
)
def test_one_worker_is_a_plain_loop_under_other_policies_too(policy: quorate.Policy) -> None:
    task = Toy(batch_norm_net)
    result = quorate.train(task, policy, quorate.Simulated(1), updates=60, seed=3)
    assert_same_bits(result.parameters, plain_loop(task, 60, seed=3))


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("together", [False, True])
def test_eight_workers_equal_one_at_eight_times_the_batch(optimizer: Any, together: bool) -> None:
    """150 samples are 18.75 batches of 8, so the run includes the short last round of every epoch."""
    task = Toy(mlp, optimizer, samples=150)
    engine = quorate.Simulated(8, "shifted-exp:1,1", together=together)
    eight = quorate.train(task, quorate.FullSync(), engine, updates=60, seed=1)
    one = quorate.train(task, quorate.FullSync(), quorate.Simulated(1), updates=60, seed=1, batch_size=64)
    for name, tensor in one.parameters.items():
        torch.testing.assert_close(eight.parameters[name], tensor, rtol=1e-4, atol=1e-5)
    assert eight.summary["samples"] == one.summary["samples"]


@pytest.mark.parametrize("make", [mlp, batch_norm_net, conv_net_with_batch_norm, batch_norm_without_statistics])
def test_a_round_as_one_big_batch_equals_separate_batches(make: Any) -> None:
    """BatchNorm too: every worker's batch is normalised by itself, and the statistics are averaged."""
    task = Toy(make, samples=150)

    def run(together: bool) -> quorate.Result:
        engine = quorate.Simulated(6, "shifted-exp:1,1", together=together)
        result = quorate.train(task, quorate.BackupSync(4, 2), engine, updates=40, seed=1)
        assert result.metrics.header["engine"]["arithmetic"] == ("together" if together else "summed")
        return result

    apart, together = run(False), run(True)
    for name, tensor in apart.parameters.items():
        torch.testing.assert_close(together.parameters[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [mlp, batch_norm_net, conv_net_with_batch_norm, batch_norm_without_statistics])
@pytest.mark.parametrize("policy", [quorate.Delayed(1), quorate.Delayed(3), quorate.Delayed(2, warm_up=12)], ids=repr)
def test_a_delayed_round_as_one_big_batch_equals_separate_batches(make: Any, policy: quorate.Policy) -> None:
    """Gradients are of the older version that the workers read, with the BatchNorm statistics of that version."""
    task = Toy(make, samples=150)

    def run(together: bool) -> quorate.Result:
        engine = quorate.Simulated(4, "shifted-exp:1,1", together=together)
        result = quorate.train(task, policy, engine, updates=40, seed=1)
        assert result.metrics.header["engine"]["arithmetic"] == ("together" if together else "kept")
        return result

    apart, together = run(False), run(True)
    for name, tensor in apart.parameters.items():
        torch.testing.assert_close(together.parameters[name], tensor, rtol=1e-3, atol=1e-4)
    assert apart.summary["staleness"] == together.summary["staleness"]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 4])
def test_delayed_equals_a_plain_loop_that_keeps_the_last_versions(delay: int, together: bool) -> None:
    task = Toy(mlp, sgd, samples=128)
    engine = quorate.Simulated(4, together=together)
    result = quorate.train(task, quorate.Delayed(delay), engine, updates=40, seed=3, batch_size=8)
    bound, cpu = BoundTask(task, 32), torch.device("cpu")
    newest, reader = bound.model(3, cpu), bound.model(3, cpu)
    optimizer, ledger = bound.optimizer(list(newest.parameters())), Ledger(128, 32, None, 3)
    versions = [copy.deepcopy(newest.state_dict())]
    for iteration in range(40):
        reader.load_state_dict(versions[max(0, iteration - delay)])
        reader.zero_grad()
        bound.loss(reader, bound.batch(torch.tensor(ledger.indices(iteration)), cpu)).backward()
        for parameter, read in zip(newest.parameters(), reader.parameters(), strict=True):
            parameter.grad = None if read.grad is None else read.grad.clone()
        optimizer.step()
        versions.append(copy.deepcopy(newest.state_dict()))
    for name, tensor in newest.state_dict().items():
        torch.testing.assert_close(result.parameters[name], tensor, rtol=1e-4, atol=1e-5)


def test_delayed_rounds_with_compensation_are_computed_apart() -> None:
    """Each gradient is compensated by its own square, which the mean does not have."""
    engine = quorate.Simulated(4, together=True)
    learning = {"delay_compensation": 0.5}
    result = quorate.train(Toy(mlp), quorate.Delayed(1), engine, updates=3, **learning)
    assert result.metrics.header["engine"]["arithmetic"] == "vmapped"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_of_groups_is_that_of_each_group(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    grouped, apart = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
    x = torch.randn(12, 5, 4, 3).contiguous(memory_format=layout)
    with batch_norm_per_group(grouped, 3):
        together = grouped(x)
    assert together.is_contiguous(memory_format=layout)
    began = {name: tensor.clone() for name, tensor in apart.state_dict().items()}
    means = []
    for group, piece in enumerate(x.chunk(3)):
        apart.load_state_dict(began)
        torch.testing.assert_close(together[4 * group : 4 * group + 4], apart(piece), rtol=1e-5, atol=1e-6)
        means.append(apart.running_mean.clone())
    torch.testing.assert_close(grouped.running_mean, torch.stack(means).mean(0))


class NotAMean(Toy):
    """A loss that couples the samples of a batch: one big batch would be wrong."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, _ = batch
        out = model(x)
        return (out @ out.T).logsumexp(1).mean()


def test_a_loss_that_is_no_mean_is_never_computed_together() -> None:
    engine = quorate.Simulated(4, together=True)
    result = quorate.train(NotAMean(), quorate.FullSync(), engine, updates=3)
    assert result.metrics.header["engine"]["arithmetic"] == "summed"
