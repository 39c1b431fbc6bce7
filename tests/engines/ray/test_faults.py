"""What dies on one node is replaced, and the run goes on; what was applied stays applied."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import quorate
from quorate.engines.ray import workers
from quorate.events import Ticket
from quorate.trace import Update
from tests.engines.ray.clusters import end, one_node
from tests.toy_tasks import Toy, adam

pytestmark = pytest.mark.ray

WORKERS = 3
LATENCY = "shifted-exp:0.02,0.01"
SAMPLES = 240  # an epoch is 30 batches


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with one_node(cpus=WORKERS):
        yield


class At(quorate.Recorder):
    """Does something once, when a version is made, and remembers what happened."""

    def __init__(self, version: int, act: Callable[[], None]) -> None:
        self._version, self._act = version, act
        self.workers_lost: list[int] = []
        self.went_on_from: list[int] = []

    def applied(self, time: float, update: Update) -> None:
        if update.version == self._version:
            self._version = -1
            self._act()

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        self.workers_lost.append(worker)

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        self.went_on_from.append(version)


def train(
    engine: quorate.Ray, at: At, policy: quorate.Policy | None = None, out: Path | None = None, **more: Any
) -> quorate.Result:
    task = Toy(optimizer=adam, samples=SAMPLES)
    result = quorate.train(task, policy or quorate.FullSync(), engine, epochs=4, recorders=(at,), out=out, **more)
    assert result.summary["samples"] == {"applied": 4 * SAMPLES, "distinct": SAMPLES}
    if out is not None:
        assert quorate.replay(out, task).result.digest == result.digest
    return result


def open_run(engine: quorate.Ray) -> Any:
    return engine._open


def process_of(engine: quorate.Ray, worker: int) -> int:
    """The process of a worker that is ready."""
    return int(open_run(engine).workers.records[worker].ready.pid)


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    engine = quorate.Ray(WORKERS, latency=LATENCY)
    at = At(10, lambda: end(process_of(engine, 1)))
    train(engine, at, out=tmp_path / "run")
    assert at.workers_lost == [1]


def test_a_stopped_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PING_S", 1.0)
    engine = quorate.Ray(WORKERS, latency=LATENCY)
    at = At(10, lambda: os.kill(process_of(engine, 2), signal.SIGSTOP))
    train(engine, at)
    assert at.workers_lost == [2]


def test_nobody_waits_for_a_killed_worker_while_the_quorum_lives() -> None:
    engine = quorate.Ray(WORKERS, latency=LATENCY, faults="lose:0@0.2;lose:1@0.6")
    at = At(-1, lambda: None)
    train(engine, at, quorate.BackupSync(1, 2))
    assert 0 in at.workers_lost


@pytest.mark.parametrize("shards", [1, 2])
def test_a_lost_shard_sends_the_run_back_to_its_checkpoint(shards: int, tmp_path: Path) -> None:
    engine = quorate.Ray(WORKERS, shards=shards, latency=LATENCY)
    at = At(25, lambda: end(open_run(engine).cut.segments[-1].pid))
    with pytest.warns(RuntimeWarning, match=r"steps back from version 2\d to its checkpoint of version \d+"):
        train(engine, at, out=tmp_path / "run", checkpoint_every=5)
    assert len(at.went_on_from) == 1 and at.went_on_from[0] <= 25


def test_without_a_folder_a_lost_shard_is_the_end_and_says_what_would_have_helped() -> None:
    engine = quorate.Ray(WORKERS, latency=LATENCY)
    at = At(5, lambda: end(open_run(engine).cut.segments[0].pid))
    with pytest.raises(quorate.LearnerLost, match="learner") as raised:
        train(engine, at)
    assert "give out" in " ".join(raised.value.__notes__)


def test_a_lost_evaluator_is_made_again(tmp_path: Path) -> None:
    import ray

    engine = quorate.Ray(WORKERS, latency=LATENCY)
    at = At(10, lambda: ray.kill(open_run(engine)._evaluator))
    train(engine, at, out=tmp_path / "run", evaluate_every=5)


def test_a_straggler_keeps_few_versions_alive() -> None:
    alive: list[int] = []

    class Count(quorate.Recorder):
        def applied(self, time: float, update: Update) -> None:
            alive.append(open_run(engine)._room._versions.in_use)

    engine = quorate.Ray(WORKERS, latency="constant:0.005*slow:0=80")
    task = Toy(samples=SAMPLES)
    for policy in (quorate.Async(), quorate.BackupSync(2, 1)):
        quorate.train(task, policy, engine, updates=120, recorders=(Count(),))
        assert max(alive) <= WORKERS + 2
        alive.clear()


def test_a_shard_lost_after_the_last_update_does_not_make_the_run_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = quorate.Ray(WORKERS, latency=LATENCY)
    from quorate.engines.ray.run import RayRun

    real = RayRun.digest

    def digest(self: Any) -> Any:
        monkeypatch.setattr(RayRun, "digest", real)
        raise quorate.LearnerLost("a shard of the learner is gone")

    monkeypatch.setattr(RayRun, "digest", digest)
    task = Toy(optimizer=adam, samples=SAMPLES)
    with pytest.warns(RuntimeWarning, match="goes on at version 12, without loss"):
        result = quorate.train(task, quorate.FullSync(), engine, updates=12, out=tmp_path / "run")
    assert result.metrics.updates == 12
    assert quorate.replay(tmp_path / "run", task).result.digest == result.digest


class Unspeakable(Exception):  # noqa: N818
    def __init__(self, *, needed: int) -> None:
        super().__init__("in the user's evaluation")


class Untellable(Toy):
    def evaluate(self, model: Any) -> dict[str, float]:
        raise Unspeakable(needed=1)


def test_an_error_that_cannot_be_sent_ends_the_run_with_its_text(tmp_path: Path) -> None:
    engine = quorate.Ray(WORKERS, latency=LATENCY)
    with pytest.raises(quorate.WorkerFailed, match="in the user's evaluation"):
        quorate.train(Untellable(), quorate.FullSync(), engine, updates=4, evaluate_every=1, out=tmp_path / "run")
