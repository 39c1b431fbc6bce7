"""The command line, run in this process: quick, and with the same exit statuses and streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quorate.cli import main
from tests.fonts import fonts_are_open as fonts_are_open

TASKS = '''
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Lacking:
    """Has no loss."""

    batch_size = 4

    def model(self):
        return nn.Linear(3, 1)

    def train_data(self):
        numbers = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 3, generator=numbers)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)


class Line(Lacking):
    """Learned in a moment; measures its distance."""

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).pow(2).mean()

    def evaluate(self, model):
        inputs, outputs = self.train_data().tensors
        return {"distance": float((model(inputs) - outputs).abs().mean())}


class Unmeasured(Lacking):
    loss = Line.loss


class Vector(Line):
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).pow(2)


class Empty(Line):
    def train_data(self):
        return TensorDataset(torch.randn(0, 3), torch.randn(0, 1))


class Broken(Line):
    def loss(self, model, batch):
        return 1 / 0


class BrokenLater(Line):
    """Fails after its first evaluation, until the file is removed that this makes."""

    def loss(self, model, batch):
        if Path("broken").exists():
            raise ZeroDivisionError("broken")
        return super().loss(model, batch)

    def evaluate(self, model):
        if not Path("mended").exists():
            Path("broken").touch()
        Path("mended").touch()
        return {}


class Unmeasurable(Line):
    def evaluate(self, model):
        if "MENDED" not in os.environ:
            raise ArithmeticError("in evaluate")
        return {}


class Chatty(Line):
    def evaluate(self, model):
        print("hello from the task")
        return super().evaluate(model)


class Diverging(Line):
    def loss(self, model, batch):
        return model(batch[0]).mean() * float("nan")


class Endless:
    def __getitem__(self, index):
        return torch.ones(3) * (index % 3), torch.ones(1)


class Stream(Line):
    def train_data(self):
        return Endless()

    def evaluate(self, model):
        return {}
'''


class Ran(NamedTuple):
    """What came of one command."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


Quorate = Callable[..., Ran]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands run; it holds small tasks."""
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quorate_command(here: Path, capsys: pytest.CaptureFixture[str]) -> Quorate:
    """`quorate_command("simulate", "--seed", 3)` runs `quorate simulate --seed 3`."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Ran(status, printed.out, printed.err)

    return run
