"""Scripts that skip steps, sit rounds out, load late or set their own learning rates: nobody hangs, nobody differs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quorate import BackupSync, BadInput, QuorateError
from quorate.data_parallel.lazy_tensors import Gate, Guard
from quorate.data_parallel.optimizer_steps import PartialSteps
from tests.data_parallel.fake_group import FakeProcess, World

#: Workers are late on purpose, and have no sampler.
pytestmark = pytest.mark.filterwarnings("ignore:a gradient of some samples was not used")


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _batch(worker: int, iteration: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * worker + iteration))


def _backward(process: FakeProcess, iteration: int) -> None:
    process.driver.begin()
    process.net(_batch(process.worker, iteration)).square().mean().backward()


def test_a_schedule_goes_on_where_a_worker_sits_rounds_out() -> None:
    """Its scheduler falls behind; worker 0's learning rates count, and versions are counted alike."""
    world = World(_net, _sgd, 2, sits_out=lambda worker, round: worker == 1 and round % 2 == 1)
    for process in world.processes:
        process.driver.plane.leader = 0  # type: ignore[attr-defined]
    seen: dict[int, list[int]] = {0: [], 1: []}

    def script(process: FakeProcess) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(process.optimizer, 0.7)
        for iteration in range(6 if process.worker == 0 else 3):
            _backward(process, iteration)
            seen[process.worker].append(process.step().version)
            scheduler.step()

    world.run(script)
    assert world.check_identical() == 6
    assert seen == {0: [1, 2, 3, 4, 5, 6], 1: [2, 4, 6]}


def test_a_dropped_gradient_counts_the_samples_of_all_its_micro_batches() -> None:
    world = World(_net, _sgd, 2, policy=BackupSync(1, 1))
    lost: list[int | None] = []
    begun, made = [threading.Event() for _ in range(3)], [threading.Event() for _ in range(3)]

    def script(process: FakeProcess) -> None:
        for iteration in range(3):
            for part in range(4):
                process.driver.begin(3)
                process.net(_batch(process.worker, 4 * iteration + part)).square().mean().backward()
            if process.worker == 1:
                begun[iteration].set()
                assert made[iteration].wait(60)
            else:
                assert begun[iteration].wait(60)
            receipt = process.step()
            if process.worker == 0:
                made[iteration].set()
            if not receipt.applied and not receipt.over:
                lost.append(receipt.lost_samples)

    world.run(script)
    assert lost == [12, 12, 12]


def test_learning_rates_that_differ_are_found_at_the_next_update() -> None:
    def script(process: FakeProcess) -> None:
        for iteration in range(5):
            if iteration == 2 and process.worker == 1:
                process.optimizer.param_groups[0]["lr"] = 0.01
            _backward(process, iteration)
            process.step()

    with pytest.raises(QuorateError, match="other hyperparameters"):
        World(_net, _sgd, 2).run(script)


@pytest.mark.parametrize("sits_out", [False, True])
def test_a_skipped_step_leaves_nobody_waiting(sits_out: bool) -> None:
    """As a scaler that sees Inf; also before a round that a worker sits out, and when one has ended."""
    world = World(_net, _sgd, 2, sits_out=lambda worker, round: sits_out and worker == 1 and round == 2)

    def script(process: FakeProcess) -> None:
        rounds = [round for round in range(6) if not (sits_out and process.worker == 1 and round == 2)]
        for round in rounds[: len(rounds) - 2 * process.worker]:  # worker 1 ends early
            _backward(process, round)
            if round in (1, 5):
                for parameter in process.net.parameters():
                    assert parameter.grad is not None
                    parameter.grad.norm()  # everybody looks, and skips
                process.optimizer.zero_grad()
            else:
                process.step()

    world.run(script)
    assert world.check_identical() == 4


def test_what_a_script_loads_after_wrapping_is_not_lost_where_others_are_quicker() -> None:
    world = World(_net, _sgd, 2, policy=BackupSync(1, 1))
    torch.manual_seed(77)
    saved = _net().state_dict()

    def script(process: FakeProcess) -> None:
        if process.worker == 1:
            time.sleep(0.2)  # still reading its file
        process.net.load_state_dict(saved)
        for iteration in range(8):
            _backward(process, iteration)
            if process.step().over:
                break

    world.run(script)
    world.check_identical()
    assert all(torch.equal(world.processes[0].weights[name], world.processes[1].weights[name]) for name in saved)


def test_a_mask_of_infinities_is_no_bad_gradient() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    world = World(Masked, _sgd, 2, policy=BackupSync(2, 0))
    applied: list[bool] = []

    def script(process: FakeProcess) -> None:
        for iteration in range(3):
            _backward(process, iteration)
            applied.append(process.step().applied)

    world.run(script)
    assert applied == [True] * 6
    assert torch.isinf(world.processes[0].net.get_buffer("mask")).sum() == 6


def test_batch_norm_counts_every_iteration_under_a_delay() -> None:
    world = World(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), _sgd, 2, delay=2)

    def script(process: FakeProcess) -> None:
        for iteration in range(12):
            _backward(process, iteration)
            process.step()

    world.run(script)
    assert [int(process.net.get_buffer("1.num_batches_tracked")) for process in world.processes] == [12, 12]
    assert torch.allclose(world.processes[0].weights["1.running_mean"], world.processes[1].weights["1.running_mean"])


def test_an_optimizer_that_grows_or_counts_in_its_groups_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    steps = PartialSteps(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(BadInput, match="had 1 parameters when the model was wrapped, now 2"):
        steps.hyper()

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["lr"] *= 0.5

    counting = PartialSteps(Counting([parameter], lr=0.1))
    with pytest.raises(BadInput, match="changes 'lr'"):
        counting.apply({parameter: torch.ones(3)}, counting.hyper())


def test_a_module_is_wrapped_once() -> None:
    net = _net()
    guard = Guard(net, Gate(lambda numbers: None))
    with pytest.raises(BadInput, match="in a DataParallel already"):
        Guard(net, Gate(lambda numbers: None))
    guard.remove()
    Guard(net, Gate(lambda numbers: None)).remove()


def test_a_backward_pass_that_broke_off_is_not_gone_on_from() -> None:
    world = World(_net, _sgd, 1)

    def script(process: FakeProcess) -> None:
        handle = process.net[0].weight.register_hook(lambda gradient: 1 / 0)  # type: ignore[index, union-attr]
        with pytest.raises(ZeroDivisionError):
            _backward(process, 0)
        handle.remove()
        _backward(process, 1)

    with pytest.raises(QuorateError, match="broke off in the middle"):
        world.run(script)
