"""A node that announces its end is emptied first: workers finish what they do, and its shard moves without loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import quorate
from quorate.events import Ticket
from quorate.trace import Update
from tests.engines.ray.clusters import SeveralNodes, several_nodes
from tests.toy_tasks import Toy, adam

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SAMPLES = 480  # an epoch is 60 batches


@pytest.fixture
def cluster() -> Iterator[SeveralNodes]:
    with several_nodes(2, cpus=2) as nodes:
        yield nodes


class Watch(quorate.Recorder):
    def __init__(self, cluster: SeveralNodes, engine: quorate.Ray) -> None:
        self._cluster, self._engine = cluster, engine
        self.tickets_lost: list[Ticket] = []
        self.made: list[int] = []
        self.went_on_from: list[int] = []
        self.leaving: str | None = None

    def applied(self, time_: float, update: Update) -> None:
        self.made.append(update.version)
        if update.version == 20 and self.leaving is None:
            self.leaving = drain(self._cluster.nodes[0])
            self._cluster.add()

    def lost(self, time_: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        if not self.went_on_from:
            self.tickets_lost += tickets

    def resumed(self, time_: float, version: int, limits: dict[str, Any]) -> None:
        self.went_on_from.append(version)
        self.last_before = self.made[-1]


def drain(node: Any) -> str:
    """What a cloud's warning comes to: this node will be gone in a minute."""
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = client.drain_node(node.node_id, reason, "the spot market", int((time.time() + 60) * 1000))
    assert accepted, why
    return str(node.node_id)


def test_its_workers_and_its_shard_leave_in_time(cluster: SeveralNodes, tmp_path: Path) -> None:
    engine = quorate.Ray(4, shards=3, latency="shifted-exp:0.05,0.02")
    task = Toy(optimizer=adam, samples=SAMPLES)
    watch = Watch(cluster, engine)
    with pytest.warns(RuntimeWarning, match="announced its end; the run goes on at version"):
        result = quorate.train(
            task, quorate.BackupSync(2, 2), engine, epochs=4, recorders=(watch,), out=tmp_path / "run"
        )
    assert watch.went_on_from == [watch.last_before]  # nothing that was applied was lost
    assert result.summary["samples"] == {"applied": 4 * SAMPLES, "distinct": SAMPLES}
    assert quorate.replay(tmp_path / "run", task).result.digest == result.digest


def test_references_do_not_pile_up_at_the_driver(cluster: SeveralNodes) -> None:
    """Late gradients and old versions are freed at once, whatever the stragglers do."""
    import ray

    counts: list[int] = []

    class Count(quorate.Recorder):
        def applied(self, time_: float, update: Update) -> None:
            worker = ray._private.worker.global_worker
            counts.append(len(worker.core_worker.get_all_reference_counts()))

    task = Toy(samples=SAMPLES)
    engine = quorate.Ray(4, latency="constant:0.01*slow:0=40")
    quorate.train(task, quorate.BackupSync(3, 1), engine, updates=150, recorders=(Count(),))
    assert max(counts[50:]) <= max(counts[:50]) + 5
