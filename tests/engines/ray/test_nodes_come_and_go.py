"""Nodes are killed and others join: the run goes on, and uses every sample exactly once an epoch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

import quorate
from quorate.trace import Update
from tests.engines.ray.clusters import SeveralNodes, several_nodes
from tests.toy_tasks import Toy, plain_sgd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

WORKERS, QUORUM, EPOCHS = 4, 2, 7
SAMPLES, BATCH = 1200, 8  # an epoch is 75 updates
LATENCY = "shifted-exp:0.05,0.02"


def task() -> Toy:
    return Toy(optimizer=plain_sgd, samples=SAMPLES, batch_size=BATCH)


@pytest.fixture
def cluster() -> Iterator[SeveralNodes]:
    with several_nodes(WORKERS, cpus=1) as nodes:
        yield nodes


class Killer(quorate.Recorder):
    """Kills the oldest node every so often, and adds another."""

    def __init__(self, cluster: SeveralNodes, every_s: float) -> None:
        self._cluster, self._every_s = cluster, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.killed = 0

    def __enter__(self) -> Killer:
        return self

    def applied(self, time: float, update: Update) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._cluster.kill(0)
            self._cluster.add()
            self.killed += 1


class Watch(quorate.Recorder):
    """What was applied, over all steps back."""

    def __init__(self) -> None:
        self.steps_back: list[int] = []
        self.versions: list[int] = []

    def applied(self, time: float, update: Update) -> None:
        self.versions.append(update.version)

    def resumed(self, time: float, version: int, limits: dict[str, object]) -> None:
        self.steps_back.append(version)


def test_a_node_is_killed_every_five_seconds(cluster: SeveralNodes, tmp_path: Path) -> None:
    """With one worker a node and one shard a node, every kill takes a worker, and the first ones a shard each."""
    policy = quorate.BackupSync(QUORUM, WORKERS - QUORUM)
    undisturbed = quorate.train(task(), policy, quorate.Simulated(WORKERS, LATENCY), epochs=EPOCHS)
    watch = Watch()
    with Killer(cluster, 5.0) as killer, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = quorate.train(
            task(),
            policy,
            quorate.Ray(WORKERS, latency=LATENCY),
            epochs=EPOCHS,
            out=tmp_path / "run",
            recorders=(watch, killer),
        )
    assert killer.killed >= 4
    assert watch.steps_back, [str(one.message) for one in said]
    assert result.metrics.updates >= 500
    assert result.summary["samples"] == {"applied": EPOCHS * SAMPLES, "distinct": SAMPLES}
    assert abs(result.evaluation["accuracy"] - undisturbed.evaluation["accuracy"]) <= 0.01
    assert quorate.replay(tmp_path / "run", task()).result.digest == result.digest
