"""Models and tasks that do what few do: the numbers stay those of a replay in one process."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quorate
from tests.toy_tasks import Toy, plain_sgd


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 512), nn.Linear(512, 3))


def slow_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4)


class Derived(Toy):
    """Computes with weights derived from the parameters, beside a copy of the model, and calls layers by keyword."""

    def __init__(self) -> None:
        super().__init__(wide, slow_sgd, samples=64)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        copied = copy.deepcopy(model)
        assert isinstance(copied, nn.Sequential)
        copied[1](input=torch.zeros(2, 512)).sum().backward()
        tripled = {name: parameter * 3 for name, parameter in model.named_parameters()}
        return functional.cross_entropy(torch.func.functional_call(model, tripled, (x,)), y)


class Counting(nn.Module):
    """Puts a new tensor in the place of a buffer, and measures with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        y: Tensor = self.layer(x)
        return y


class Counted(Toy):
    def __init__(self) -> None:
        super().__init__(Counting)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"luck": float(torch.rand(()))}


def odd_sizes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 33), nn.ReLU(), nn.Linear(33, 3))


def numpy_rate(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=np.float64(0.05))


class LeavesAChild(Toy):
    """Forks a child, which inherits the line to the main process, and is killed."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().loss(model, batch)
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        Path(self.marker).write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


@pytest.mark.parametrize("task", [Derived, Counted])
def test_a_replay_has_the_same_parameters(task: type[Toy], tmp_path: Path) -> None:
    result = quorate.train(task(), quorate.FullSync(), 2, updates=12, out=tmp_path / "run")
    assert quorate.replay(tmp_path / "run", task()).result.digest == result.digest
    if task is Counted:
        assert result.parameters["seen"] == 12


def test_two_threads_and_clipping_replay_alike(tmp_path: Path) -> None:
    learning = {"clip_norm": 0.01}
    engine = quorate.Local(1, threads=2)
    result = quorate.train(Toy(wide, slow_sgd), quorate.FullSync(), engine, updates=5, **learning, out=tmp_path / "run")
    assert quorate.replay(tmp_path / "run", Toy(wide, slow_sgd)).result.digest == result.digest


def test_a_block_that_was_a_version_has_no_stray_numbers_on_a_16_bit_wire() -> None:
    engine = quorate.Local(2, wire="bf16")
    result = quorate.train(Toy(odd_sizes, plain_sgd), quorate.BackupSync(1, 1), engine, updates=400)
    assert result.summary["tickets"]["refused"] == 0


def test_a_state_that_cannot_be_saved_costs_the_checkpoints_not_the_run(tmp_path: Path) -> None:
    task = Toy(optimizer=numpy_rate)
    with pytest.warns(RuntimeWarning, match=r"keeps no checkpoints.*float64"):
        quorate.train(task, quorate.FullSync(), 2, updates=5, out=tmp_path / "run")
    assert (tmp_path / "run" / "parameters.safetensors").exists()
    with pytest.raises(quorate.BadInput, match="float64"):
        quorate.train(task, quorate.FullSync(), 2, updates=5, out=tmp_path / "other", checkpoint_every=2)


def test_a_child_that_outlives_its_worker_does_not_hide_the_loss(tmp_path: Path) -> None:
    result = quorate.train(LeavesAChild(str(tmp_path / "marker")), quorate.FullSync(), 2, updates=12)
    child = int((tmp_path / "marker").read_text())
    os.kill(child, signal.SIGKILL)  # it is still there, and held the line open all the time
    assert result.summary["tickets"]["lost"] == 1


def test_a_fault_for_a_worker_that_there_is_not() -> None:
    with pytest.raises(quorate.BadInput, match="worker 9"):
        quorate.Local(4, faults="lose:9@1")
