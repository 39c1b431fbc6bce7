"""Whole data planes of several workers in threads, with delays at every all-reduce and workers that are late.

The arithmetic of a plain loop is known to the bit, so full and delayed sync must give exactly that. Under a quorum
nobody knows beforehand who is late; but every version must be the same everywhere, and whoever computes on a version
must see that version, whole, for as long as it computes.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quorate import BackupSync, Deadline
from quorate.learner import digest
from quorate.policies import AdaptiveBackup, Policy
from tests.data_parallel.fake_group import FakeProcess, World

#: Workers are late on purpose, and have no sampler.
pytestmark = pytest.mark.filterwarnings("ignore:a gradient of some samples was not used")

WORKERS = 3


class Net(nn.Module):
    """Layers of different sizes, one shared, one never used, one used only now and then."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 17), nn.Linear(17, 17), nn.Linear(17, 3)
        self.norm = nn.BatchNorm1d(17) if norm else nn.Identity()
        self.sometimes, self.never = nn.Linear(17, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor, detour: bool = False) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        hidden = torch.relu(self.middle(self.middle(hidden)))
        out: Tensor = self.last(hidden)
        return out + self.sometimes(hidden) if detour else out


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _batch(worker: int, iteration: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * worker + iteration))


def _loss(net: nn.Module, worker: int, iteration: int) -> Tensor:
    detour = iteration % 5 == worker  # one worker at a time, often none
    loss: Tensor = net(_batch(worker, iteration), detour).square().mean()
    return loss


def _plain_loop(
    make: Callable[[Any], torch.optim.Optimizer],
    iterations: int,
    delay_at: Callable[[int], int] = lambda iteration: 0,
    batches: Callable[[int], int] = lambda worker: 10**9,
    lr_at: Callable[[int], float] | None = None,
    clip_norm: float | None = None,
) -> dict[str, Tensor]:
    """What one process computes that has every batch: the mean of iteration i is applied before i + 1 + delay."""
    torch.manual_seed(1)
    net = Net()
    optimizer = make(net.parameters())
    waiting: deque[tuple[list[Tensor | None], float | None]] = deque()

    def apply() -> None:
        gradients, lr = waiting.popleft()
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()

    for iteration in range(iterations):
        sums: list[Tensor | None] = [None] * len(list(net.parameters()))
        present = [worker for worker in range(WORKERS) if iteration < batches(worker)]
        for worker in present:
            gradients = torch.autograd.grad(_loss(net, worker, iteration), list(net.parameters()), allow_unused=True)
            for number, gradient in enumerate(gradients):
                known = sums[number]
                if gradient is not None:  # divided first, so that small types hold the sum; the bits depend on it
                    part = gradient * (1 / WORKERS)
                    sums[number] = part if known is None else known + part
        means = [None if one is None else one * (WORKERS / len(present)) for one in sums]
        waiting.append((means, None if lr_at is None else lr_at(iteration)))
        while len(waiting) > delay_at(iteration + 1):
            apply()
    while waiting:
        apply()
    return net.state_dict()


def _train(iterations: Callable[[int], int], **options: Any) -> Callable[[FakeProcess], None]:
    lr_at = options.get("lr_at")

    def script(process: FakeProcess) -> None:
        draw = random.Random(process.worker)
        for iteration in range(iterations(process.worker)):
            process.driver.begin()
            if draw.random() < 0.1:
                time.sleep(draw.random() * 0.003)  # a worker that is late, not a way to meet
            _loss(process.net, process.worker, iteration).backward()
            if lr_at is not None:
                process.optimizer.param_groups[0]["lr"] = lr_at(iteration)
            process.step()

    return script


def _check(world: World, expected: dict[str, Tensor], versions: int, exact: bool = True) -> None:
    assert world.check_identical() == versions
    for name, tensor in world.processes[0].weights.items():
        if exact:
            assert torch.equal(tensor, expected[name]), name
        else:
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [_sgd, _adamw])
@pytest.mark.parametrize("piece_bytes", [100, 1200, None])
def test_full_sync_is_a_plain_loop_to_the_bit(make: Any, piece_bytes: int | None) -> None:
    world = World(Net, make, WORKERS, piece_bytes=piece_bytes, most_s=0.002)
    world.run(_train(lambda worker: 25))
    _check(world, _plain_loop(make, 25), 25)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_delayed_update_is_applied_before_its_iteration_and_no_earlier(delay: int) -> None:
    world = World(Net, _sgd, WORKERS, delay=delay, most_s=0.002, seed=delay)
    world.run(_train(lambda worker: 30))
    _check(world, _plain_loop(_sgd, 30, lambda iteration: delay), 30)


def test_a_delay_that_warms_up_is_that_of_each_iteration() -> None:
    def delay_at(iteration: int) -> int:
        return min(3, iteration // 5)

    world = World(Net, _adamw, WORKERS, delay=3, delay_at=delay_at, most_s=0.002)
    world.run(_train(lambda worker: 30))
    _check(world, _plain_loop(_adamw, 30, delay_at), 30)


@pytest.mark.parametrize("delay", [0, 2])
def test_each_update_is_made_with_the_learning_rate_that_held_at_its_step(delay: int) -> None:
    def lr_at(iteration: int) -> float:
        return 0.1 / (1 + iteration)

    world = World(Net, _sgd, WORKERS, delay=delay, most_s=0.002)
    world.run(_train(lambda worker: 20, lr_at=lr_at))
    _check(world, _plain_loop(_sgd, 20, lambda iteration: delay, lr_at=lr_at), 20)


@pytest.mark.parametrize("delay", [0, 2])
def test_workers_with_fewer_batches_end_with_the_others(delay: int) -> None:
    batches = [20, 7, 13]

    def lr_at(iteration: int) -> float:
        return 0.1 / (1 + iteration)

    world = World(Net, _sgd, WORKERS, delay=delay, most_s=0.002)
    world.run(_train(lambda worker: batches[worker], lr_at=lr_at))
    # Who has no batch left learns the rate from those who have one.
    expected = _plain_loop(_sgd, 20, lambda iteration: delay, lambda worker: batches[worker], lr_at)
    if delay == 0:
        _check(world, expected, 20)
    else:  # where the last batches are applied is the end's affair, but it is the same for all
        assert world.check_identical() == 20


def test_clipping_goes_by_the_norm_of_the_mean_over_all_buckets() -> None:
    world = World(Net, _sgd, WORKERS, clip_norm=0.2, piece_bytes=300, most_s=0.001)
    world.run(_train(lambda worker: 20))
    _check(world, _plain_loop(_sgd, 20, clip_norm=0.2), 20, exact=False)
    different = _plain_loop(_sgd, 20)
    assert not torch.allclose(world.processes[0].weights["first.weight"], different["first.weight"], atol=1e-3)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_that_sits_a_round_out_takes_over_what_the_others_made(delay: int) -> None:
    """As with a sampler whose epoch ends with fewer batches than workers: here every fourth round is short."""

    def sits_out(worker: int, round: int) -> bool:
        return round % 4 == 3 and worker == 2

    counts = {0: 20, 1: 20, 2: 15}
    world = World(Net, _sgd, WORKERS, delay=delay, sits_out=sits_out, most_s=0.002)
    world.run(_train(lambda worker: counts[worker]))
    assert world.check_identical() == 20


def test_averaged_buffers_are_the_same_everywhere() -> None:
    world = World(lambda: Net(norm=True), _sgd, WORKERS, most_s=0.002)
    world.run(_train(lambda worker: 15))
    assert world.check_identical() == 15  # state_dict and all
    assert int(world.processes[1].weights["norm.num_batches_tracked"]) == 15


# ------------------------------------------------------------ quorums


def _quorate_script(process: FakeProcess, iterations: int, seed: int, watches: bool = True) -> None:
    """Trains, wakes up late, and writes down what it sees of the version it reads, before and after its backward."""
    draw, plane = random.Random(f"{seed} {process.worker}"), process.driver.plane
    me, wait_for = threading.current_thread(), plane.wait_for

    def wakes_up_late(holds: Callable[[], object]) -> None:
        wait_for(holds)
        if threading.current_thread() is me and draw.random() < 0.3:
            time.sleep(draw.random() * 0.01)

    plane.wait_for = wakes_up_late  # type: ignore[method-assign]
    reads: list[tuple[int, str]] = []
    receipts: list[Any] = []
    process.reads, process.receipts = reads, receipts  # type: ignore[attr-defined]

    def look() -> None:
        if watches:
            parameters = {name: one.detach() for name, one in process.net.named_parameters()}
            reads.append((process.driver.version, digest(parameters)))

    for iteration in range(iterations):
        look()  # between two iterations, as when a script evaluates
        process.driver.begin()
        look()
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.004)
        loss = process.net(_batch(process.worker, iteration)).square().mean()
        (loss * float("nan") if seed == 99 and draw.random() < 0.2 else loss).backward()
        look()
        process.optimizer.param_groups[0]["lr"] = 0.05 / (1 + process.driver.version)
        receipts.append(process.step())
        if receipts[-1].over:
            return


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        (BackupSync(2, 1), 0),
        (BackupSync(1, 2), 1),
        (BackupSync(1, 2, late="finish"), 2),
        (BackupSync(2, 1, late="finish"), 3),
        (Deadline(limit=0.004, min_quorum=1), 4),
        (Deadline(limit=0.002, min_quorum=2, late="finish"), 5),
        (AdaptiveBackup(), 6),
    ],
    ids=repr,
)
def test_under_a_quorum_all_make_the_same_versions_and_nobody_sees_half_of_one(policy: Policy, seed: int) -> None:
    world = World(lambda: Net(norm=True), _sgd, WORKERS, policy=policy, seed=seed, most_s=0.001)
    world.run(lambda process: _quorate_script(process, 45, seed))
    versions = world.check_identical()
    assert versions >= 40
    start = copy.deepcopy(world.processes[0].reads[0][1])  # type: ignore[attr-defined]
    for process in world.processes:
        known = {0: start, **process.versions}
        torn = [version for version, seen in process.reads if known[version] != seen]  # type: ignore[attr-defined]
        assert not torn, f"worker {process.worker} saw something else than version {torn[0]}"
    receipts = [receipt for process in world.processes for receipt in process.receipts]  # type: ignore[attr-defined]
    dropped = [receipt for receipt in receipts if not receipt.applied]
    assert all(receipt.reason for receipt in receipts)
    assert all(receipt.late_s > 0 or receipt.over for receipt in dropped)
    if not isinstance(policy, AdaptiveBackup | Deadline):
        assert dropped, "nobody was late, so nothing was tried"
    for process in world.processes:
        seen = [receipt.version for receipt in process.receipts]  # type: ignore[attr-defined]
        assert seen == sorted(seen)


def test_what_is_not_finite_never_reaches_anybody() -> None:
    world = World(Net, _sgd, WORKERS, policy=BackupSync(2, 1), seed=99, most_s=0.001)
    world.run(lambda process: _quorate_script(process, 60, 99, watches=False))
    world.check_identical()
    assert all(bool(tensor.isfinite().all()) for tensor in world.processes[0].weights.values())
    reasons = [receipt.reason for process in world.processes for receipt in process.receipts]  # type: ignore[attr-defined]
    assert "it held NaN or Inf" in reasons


def test_one_worker_alone_is_a_plain_loop() -> None:
    world = World(Net, _sgd, 1, policy=BackupSync(1, 0))

    def script(process: FakeProcess) -> None:
        for iteration in range(10):
            process.driver.begin()
            _loss(process.net, 0, iteration).backward()
            assert process.step().applied

    world.run(script)
    torch.manual_seed(1)
    net = Net()
    optimizer = _sgd(net.parameters())
    for iteration in range(10):
        optimizer.zero_grad()
        _loss(net, 0, iteration).backward()
        optimizer.step()
    _check(world, net.state_dict(), 10)
