"""`model.meet()`: all processes come to one version, whatever they have done before, and go on from it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quorate import AdaptiveBackup, BackupSync, Deadline
from quorate.policies import Policy
from tests.data_parallel.fake_group import LONG_S, FakeProcess, World
from tests.data_parallel.launching import Launcher


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _batch(worker: int, iteration: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * worker + iteration))


def _iterate(process: FakeProcess, iteration: int) -> Any:
    process.driver.begin()
    process.net(_batch(process.worker, iteration)).square().mean().backward()
    receipt = process.step()
    process.optimizer.zero_grad()
    return receipt


class Places:
    """What every worker has at each meeting; and a collective of the script's own."""

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers)
        self.seen: dict[str, list[tuple[int, dict[str, Tensor]]]] = {}

    def look(self, process: FakeProcess, place: str) -> None:
        process.driver.meet()
        state = {name: tensor.clone() for name, tensor in process.net.state_dict().items()}
        self.seen.setdefault(place, []).append((process.driver.version, state))
        self._barrier.wait(LONG_S)

    def check(self) -> None:
        for place, seen in self.seen.items():
            assert len({version for version, _ in seen}) == 1, place
            for _, state in seen[1:]:
                assert all(torch.equal(state[name], seen[0][1][name]) for name in state), place


@pytest.mark.parametrize(
    "policy",
    [
        BackupSync(2, 1),
        BackupSync(3, 0),
        BackupSync(1, 2),
        BackupSync(2, 1, late="finish"),
        Deadline(limit=0.01, min_quorum=1),
        Deadline(limit=0.01, min_quorum=3),
        AdaptiveBackup(min_quorum=1),
        AdaptiveBackup(min_quorum=2),
    ],
    ids=repr,
)
def test_all_come_to_one_version_though_some_are_slow(policy: Policy) -> None:
    world, places = World(_net, _sgd, 3, policy=policy, most_s=0.002), Places(3)
    counts = (4, 9, 6)  # iterations from one meeting to the next

    def script(process: FakeProcess) -> None:
        for meeting in range(4):
            for iteration in range(counts[(process.worker + meeting) % 3]):
                receipt = _iterate(process, 10 * meeting + iteration)
                assert not receipt.over
            places.look(process, f"{meeting}")

    world.run(script)
    world.check_identical()
    places.check()


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("counts", [(5, 5, 5), (3, 7, 5)])
def test_full_and_delayed_sync_meet_too(delay: int, counts: tuple[int, ...]) -> None:
    world, places = World(_net, _sgd, 3, delay=delay, most_s=0.002), Places(3)

    def script(process: FakeProcess) -> None:
        places.look(process, "before")
        for meeting in range(3):
            for iteration in range(counts[(process.worker + meeting) % 3]):
                _iterate(process, 10 * meeting + iteration)
            places.look(process, f"{meeting}")
            places.look(process, f"{meeting} again")

    world.run(script)
    places.check()
    expected = [0, *(max(counts) * meeting for meeting in (1, 1, 2, 2, 3, 3))]
    assert [seen[0][0] for seen in places.seen.values()] == expected


def test_a_worker_that_has_finished_does_not_hold_up_a_meeting() -> None:
    for policy in (None, BackupSync(1, 2)):
        world = World(_net, _sgd, 3, policy=policy)

        def script(process: FakeProcess) -> None:
            _iterate(process, 0)
            if process.worker == 0:
                return
            for iteration in range(3):
                process.driver.meet()
                _iterate(process, iteration)

        world.run(script)
        world.check_identical()


@pytest.mark.data_parallel
@pytest.mark.parametrize(("policy", "where"), [("backup", "optimizer.step()"), ("full", "forward")])
def test_a_process_that_waits_in_vain_says_for_whom(
    launcher: Launcher, tmp_path: Path, policy: str, where: str
) -> None:
    launch = launcher.launch("stalled.py", 3, tmp_path, policy)
    try:
        end = time.monotonic() + LONG_S
        while "has waited" not in (said := launch.text(2)):
            assert time.monotonic() < end and None in launch.poll(), said
            time.sleep(0.05)
        (line,) = [line for line in launch.text(2).splitlines() if "has waited" in line]
        assert "process 2 has waited" in line and f" s in {where}, and no process computes" in line
        assert "ranks 0, 1 have begun no iteration for" in line
        assert "in a collective of the script" in line and "model.meet()" in line
        assert "has waited" not in launch.text(0) + launch.text(1)
    finally:
        launch.close()


@pytest.mark.filterwarnings("ignore:a gradient of some samples")
def test_reading_before_the_first_iteration_waits_for_nobody() -> None:
    """Frameworks read the optimizer's state when they wrap it, while others have made versions already."""
    world, stepped = World(_net, _sgd, 3, policy=BackupSync(2, 1)), threading.Barrier(3)

    def script(process: FakeProcess) -> None:
        if process.worker < 2:
            _iterate(process, 0)
        stepped.wait(LONG_S)
        if process.worker == 2:
            with process.driver.plane.changed:
                assert process.driver.plane.changed.wait_for(lambda: process.driver.plane._released, LONG_S)
            process.driver.plane.synchronize()
        stepped.wait(LONG_S)
        for iteration in range(3):
            _iterate(process, iteration)

    world.run(script)
    world.check_identical()
