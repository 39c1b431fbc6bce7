"""A worker whose ticket is over notices between two layers, not at the end of its step."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import quorate
from tests.laws.checker import LawChecker
from tests.toy_tasks import Toy, plain_sgd

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(60)]


def deep() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, 256)]
    for _ in range(40):
        layers += [nn.ReLU(), nn.Linear(256, 256)]
    return nn.Sequential(*layers, nn.Linear(256, 3))


def huge() -> nn.Module:
    """Large enough that gradients are summed ahead, by several threads, and written by the layers themselves."""
    return nn.Sequential(nn.Linear(6, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.ReLU(), nn.Linear(1100, 3))


class Wide(Toy):
    """Many rows in a batch, so that a layer takes its time."""

    def __init__(self, make: Any = deep, samples: int = 2000, batch_size: int = 200) -> None:
        super().__init__(make, plain_sgd, samples, batch_size)


def test_a_cancelled_worker_stops_long_before_its_step_is_over(tmp_path: Path) -> None:
    noticed: list[float] = []
    steps: list[float] = []
    for attempt in range(5):  # how often one is amid its step when the others are done is up to the machine
        out = tmp_path / str(attempt)
        quorate.train(Wide(), quorate.BackupSync(2, 2), quorate.Local(4), epochs=3, out=out, evaluate_every=10_000)
        trace = list(quorate.read_trace(out))
        noticed += [record["cancel_s"] for record in trace if record["event"] == "abandon"]
        steps += [record["compute_s"] for record in trace if record["event"] == "arrive"]
        if len(noticed) >= 10:
            break
    assert len(noticed) >= 10 and len(steps) >= 20
    assert median(noticed) < median(steps) / 2


@pytest.mark.parametrize(
    "policy",
    [quorate.BackupSync(2, 1), quorate.BackupSync(2, 1, late="finish"), quorate.FullSync(), quorate.KBatchSync(2)],
    ids=repr,
)
def test_a_large_model_has_the_bits_of_its_replay(tmp_path: Path, policy: quorate.Policy) -> None:
    """Sums made ahead of time, arrivals dropped that were in them, work cancelled amid a layer."""
    task, laws = Wide(huge, 400, 32), LawChecker(policy, 3, 13, 3)
    engine = quorate.Local(3, latency="shifted-exp:0.001,0.01")
    result = quorate.train(task, policy, engine, epochs=3, out=tmp_path / "run", recorders=(laws,))
    assert result.summary["samples"] == {"applied": 1200, "distinct": 400}
    assert quorate.replay(tmp_path / "run", task).result.digest == result.digest


def test_sums_are_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is about something."""
    from quorate.engines.local.versions import LocalVersions

    folded, real = [], LocalVersions.fold

    def fold(self: LocalVersions) -> None:
        folded.append(len(self._waiting))
        real(self)

    monkeypatch.setattr(LocalVersions, "fold", fold)
    engine = quorate.Local(3, latency="shifted-exp:0.001,0.01")
    quorate.train(Wide(huge, 400, 32), quorate.FullSync(), engine, epochs=3)
    assert folded


def test_half_a_wire_has_the_bits_of_its_replay(tmp_path: Path) -> None:
    task = Toy(deep)
    result = quorate.train(
        task, quorate.BackupSync(2, 1), quorate.Local(3, wire="bf16"), epochs=1, out=tmp_path / "run"
    )
    replayed = quorate.replay(tmp_path / "run", task).result
    assert replayed.digest == result.digest
    whole = quorate.train(task, quorate.FullSync(), quorate.Local(1), updates=3)
    half = quorate.train(task, quorate.FullSync(), quorate.Local(1, wire="bf16"), updates=3)
    assert whole.digest != half.digest
    name = next(iter(whole.parameters))
    torch.testing.assert_close(whole.parameters[name], half.parameters[name], rtol=0.05, atol=0.01)
