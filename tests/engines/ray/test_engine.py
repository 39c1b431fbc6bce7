"""The Ray engine on one node: decisions, numbers, and what it keeps of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import torch

import quorate
from quorate import stopping
from quorate.checkpoint import CheckpointFolder
from quorate.trace import Update
from tests.engines.ray.clusters import one_node
from tests.toy_tasks import Toy, adam, batch_norm_net

pytestmark = pytest.mark.ray

#: Far enough apart that who comes first is no question, also on a busy machine.
FIXED = "constant:0.25*slow:1=2,2=4"
WORKERS = 3


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with one_node(cpus=4):
        yield


class Decisions(quorate.Recorder):
    def __init__(self) -> None:
        self.made: list[Any] = []

    def applied(self, time: float, update: Update) -> None:
        self.made.append([(one.worker, one.batch, one.version) for one in update.tickets])


def run(engine: quorate.Engine, policy: quorate.Policy, **more: Any) -> tuple[quorate.Result, list[Any]]:
    decisions = Decisions()
    task = Toy(batch_norm_net, adam)
    result = quorate.train(task, policy, engine, updates=8, seed=3, recorders=(decisions,), **more)
    return result, decisions.made


def test_fixed_arrivals_give_the_decisions_and_parameters_of_the_other_engines(tmp_path: Path) -> None:
    """Clipping and averaging too, which on two shards take the word of both."""
    policy = quorate.BackupSync(2, 1)
    learning = {"clip_norm": 0.5, "ema": 0.9}
    on_ray, ours = run(quorate.Ray(WORKERS, shards=2, latency=FIXED), policy, **learning, out=tmp_path / "run")
    local, theirs = run(quorate.Local(WORKERS, latency=FIXED), policy, **learning)
    simulated, on_paper = run(quorate.Simulated(WORKERS, FIXED), policy, **learning)
    assert ours == theirs == on_paper
    assert on_ray.digest == local.digest  # the same arithmetic, so the same bits
    assert on_ray.averaged is not None and local.averaged is not None and simulated.averaged is not None
    for name, value in simulated.parameters.items():
        assert torch.allclose(on_ray.parameters[name], value, atol=1e-5)
        assert torch.equal(on_ray.averaged[name], local.averaged[name])
    assert [(one.version, one.measures) for one in on_ray.metrics.evaluations] == [
        (one.version, one.measures) for one in local.metrics.evaluations
    ]
    assert quorate.replay(tmp_path / "run", Toy(batch_norm_net, adam)).result.digest == on_ray.digest


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    policy, task = quorate.FullSync(), Toy(batch_norm_net, adam)
    quorate.train(task, policy, quorate.Ray(2, shards=2), updates=6, out=tmp_path / "run")
    went_on = quorate.resume(tmp_path / "run", task, quorate.Ray(2, shards=2), updates=12)
    whole = quorate.train(task, policy, quorate.Local(2), updates=12)
    assert went_on.metrics.updates == 12
    assert went_on.summary["samples"]["applied"] == whole.summary["samples"]["applied"]
    assert quorate.replay(tmp_path / "run", task).result.digest == went_on.digest


class Endless(Toy):
    """Its third evaluation asks the driver to end, and never ends itself."""

    def __init__(self) -> None:
        super().__init__(batch_norm_net, adam)
        self.driver, self.evaluations = os.getpid(), 0

    def evaluate(self, model: Any) -> dict[str, float]:
        self.evaluations += 1
        if self.evaluations == 3:
            os.kill(self.driver, signal.SIGTERM)
            time.sleep(300)
        return super().evaluate(model)


@pytest.mark.timeout(120)
def test_a_signal_ends_an_evaluation_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor that evaluates writes the checkpoints as well, so another one takes its place."""
    monkeypatch.setattr(stopping, "FINISH_S", 0.5)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        quorate.train(
            *(Endless(), quorate.FullSync(), quorate.Ray(2)), updates=9, evaluate_every=1, out=tmp_path / "run"
        )
    assert max(CheckpointFolder(tmp_path / "run").versions()) == 3
    monkeypatch.undo()
    went_on = quorate.resume(tmp_path / "run", Toy(batch_norm_net, adam), quorate.Ray(2), updates=9)
    assert went_on.metrics.updates == 9
