"""What is published: the right numbers, and no more bytes for a longer run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import quorate
from quorate.events import Ticket
from quorate.metrics import metrics_of
from quorate.reporting.live.state import LiveMetrics, Series, snapshot
from quorate.reporting.live.watcher import Watcher
from quorate.reporting.report.trace_pass import gather
from quorate.trace import Update, feed, read_trace

from .conftest import GrowingTrace
from .runs import begin, end, full_round, round_of


def live_metrics(run: Path) -> LiveMetrics:
    metrics = LiveMetrics()
    feed(read_trace(run), metrics)
    return metrics


def test_the_numbers_of_a_run_known_by_hand(trace: GrowingTrace) -> None:
    metrics = LiveMetrics()
    begin(metrics)
    for version in range(4):
        round_of(metrics, version, loss=4.0 - version)
    state = snapshot(metrics)
    assert (state["updates"], state["expected_updates"], state["share"], state["seconds"]) == (4, 10, 0.4, 4.0)
    assert state["run"]["policy"] == "backup 2+1"
    assert state["loss"] == {
        "last": 1.0,
        "curve": {name: [4.0, 3.0, 2.0, 1.0] for name in ("mean", "low", "high")} | {"time": [1.0, 2.0, 3.0, 4.0]},
    }
    assert state["measures"][0]["name"] == "accuracy"
    assert state["measures"][0]["last"] == 0.53
    assert state["kth_arrival_s"] == {"k": [1, 2], "mean_s": [0.25, 1.0]}
    assert state["tickets"]["drop_share"] == pytest.approx(1 / 3)
    assert state["tickets"]["reasons"] == [{"reason": "late: its version is over", "count": 4}]
    assert (state["pace"]["recent_per_s"], state["pace"]["per_s"], state["pace"]["recent_p99_s"]) == (1.0, 1.0, 1.0)
    # a version to each of three workers and two gradients back, four times; a cancelled worker's are not used
    assert state["bytes"] == {"sent": 4 * 5 * 1000, "used": 4 * 4 * 1000}
    rows = {row["worker"]: row for row in state["workers"]["rows"]}
    assert [rows[worker]["state"] for worker in range(3)] == ["waiting", "waiting", "late"]
    assert [rows[worker]["pace_s"] for worker in range(3)] == [0.25, 1.0, 1.0]
    assert rows[0]["slowness"] == 0.25
    metrics.lost(4.5, 1, ())
    metrics.ended(5.0, 4, "limit reached", None)
    state = snapshot(metrics)
    assert state["workers"]["states"] == {"computing": 0, "waiting": 2, "late": 0, "lost": 1}
    assert state["ending"] == "limit reached"
    assert state["share"] == 1.0


def test_choices_of_an_adaptive_policy_are_shown_newest_first() -> None:
    metrics = LiveMetrics()
    begin(metrics)
    for version in range(20):
        metrics.chose(float(version), version, 2 + version % 2, f"reason {version}")
    state = snapshot(metrics)
    assert [choice["version"] for choice in state["choices"]] == [19, 18, 17, 16, 15, 14, 13, 12]
    assert state["choices"][0] == {"time": 19.0, "version": 19, "quorum": 3, "reason": "reason 19"}
    assert state["quorum"]["last"] == 3


@pytest.mark.parametrize(
    "policy", [quorate.BackupSync(3, 1, late="finish"), quorate.Async(), quorate.Deadline(), quorate.KBatchSync(3)]
)
def test_watching_agrees_with_the_summary_of_the_run(tmp_path: Path, policy: quorate.Policy) -> None:
    engine = quorate.Simulated(4, "shifted-exp:1,1", faults="lose:0@9;join:0@12;crash:50,5")
    quorate.train(None, policy, engine, updates=200, out=tmp_path / "run")
    state, summary = snapshot(live_metrics(tmp_path / "run")), metrics_of(tmp_path / "run").summary()
    assert state["updates"] == summary["updates"]
    assert state["seconds"] == summary["seconds"]
    assert state["bytes"]["sent"] == summary["bytes"]["sent"]
    assert state["samples"] == summary["samples"]["applied"]
    assert state["staleness"]["mean"] == summary["staleness"]["mean"]
    assert state["pace"]["p99_s"] == summary["update_seconds"]["p99"]
    for name in ("applied", "dropped", "lost"):
        assert state["tickets"][name] == summary["tickets"][name]


def test_the_snapshot_does_not_grow_with_the_run_nor_much_with_the_workers(tmp_path: Path) -> None:
    sizes = {}
    for workers, updates in ((8, 2_000), (8, 10_000), (5_000, 3)):
        engine = quorate.Simulated(workers, "shifted-exp:1,1")
        out = tmp_path / f"{workers}-{updates}"
        quorate.train(None, quorate.Async() if workers == 8 else quorate.FullSync(), engine, updates=updates, out=out)
        metrics = live_metrics(out)
        sizes[workers, updates] = len(json.dumps(snapshot(metrics)))
        assert len(metrics.choices) + len(metrics.recent_s) <= 300
    assert sizes[8, 10_000] < 1.3 * sizes[8, 2_000]
    assert sizes[5_000, 3] < 40_000


def test_long_names_and_many_measures_and_reasons_are_cut(trace: GrowingTrace) -> None:
    metrics = LiveMetrics()
    begin(metrics, task="x" * 10**6, updates=None, until="accuracy>=0.9", seed=["x" * 10**6])
    round_of(metrics, 0)
    metrics.evaluated(1.0, 1, {f"measure {number}": 1.0 for number in range(1000)})
    for number in range(1000):
        metrics.drops[f"reason {number}"] = 1
    metrics.header["policy"] = {"name": "\x1b[31mred\x07"}
    state = snapshot(metrics)
    assert len(json.dumps(state)) < 10_000
    assert state["share"] is None
    assert state["run"]["policy"] == "�[31mred� 3", "nothing that would command a terminal"


def test_not_a_number_becomes_null(trace: GrowingTrace) -> None:
    begin(trace)
    round_of(trace, 0)
    trace.evaluated(1.0, 1, {"accuracy": float("inf"), "distance": float("nan")})
    end(trace, 1)
    with Watcher(trace.path) as watcher:
        state = json.loads(watcher.published.body)["state"]
    accuracy, distance = state["measures"]
    assert accuracy["last"] is None
    assert accuracy["curve"]["mean"] == [0.5], "what cannot be drawn is left out"
    assert distance == {"name": "distance", "last": None, "curve": {"time": [], "mean": [], "low": [], "high": []}}


def test_a_series_keeps_its_mean_and_its_extremes_in_a_bounded_number_of_points() -> None:
    series = Series(most=10)
    values = [float(number * 7919 % 1009) for number in range(10_000)]
    for place, value in enumerate(values):
        series.add(float(place), value)
    points = series.points()
    assert 5 <= len(points) <= 11
    assert points[-1].time == 9_999
    assert (min(point.low for point in points), max(point.high for point in points)) == (0.0, 1008.0)
    assert len({later.time - sooner.time for sooner, later in pairwise(points[:-1])}) == 1, "all stand for as many"
    first = values[: int(points[0].time) + 1]
    assert points[0].mean == pytest.approx(sum(first) / len(first))


@pytest.mark.parametrize(
    "policy",
    [quorate.AdaptiveBackup(), quorate.Deadline(quorum=6), quorate.SoftSync(6), quorate.Delayed(1), quorate.FullSync()],
    ids=lambda policy: policy.name,
)
def test_how_far_a_run_of_epochs_is_follows_its_samples(tmp_path: Path, policy: quorate.Policy) -> None:
    """Updates of an epoch may follow from what arrives; neither the bar nor "x of y" may run past the end."""
    seen: list[quorate.Progress] = []
    engine = quorate.Simulated(8, "shifted-exp:1,1")
    quorate.train("digits", policy, engine, epochs=2, out=tmp_path / "run", on_progress=seen.append)
    assert [one.share == 1.0 for one in seen] == [False] * (len(seen) - 1) + [True]
    records = list(read_trace(tmp_path / "run"))
    half = next(place for place, one in enumerate(records) if one.get("version", 0) > len(seen) / 2)
    metrics = LiveMetrics()
    feed(records[:half], metrics)
    assert metrics.share() == pytest.approx(metrics.samples_applied / (2 * metrics.header["samples"]))
    assert metrics.expected_updates in (None, len(seen))


def test_the_mean_time_to_the_kth_arrival_is_the_reports(tmp_path: Path) -> None:
    """Rounds that ran out of batches are left out, and where there are no rounds there is no curve."""
    for policy, has_rounds in ((quorate.BackupSync(6, 2), True), (quorate.Async(), False), (quorate.Delayed(1), False)):
        run = tmp_path / policy.name
        quorate.train("digits", policy, quorate.Simulated(8, "shifted-exp:1,1"), epochs=2, out=run)
        found = gather(run).gatherer.arrivals.data()
        assert (found is not None) == has_rounds
        shown = snapshot(live_metrics(run))["kth_arrival_s"]
        assert shown["mean_s"] == pytest.approx([] if found is None else found["means"], rel=1e-5)


def test_a_gradient_that_was_refused_counts_as_dropped() -> None:
    metrics = LiveMetrics()
    begin(metrics)
    ticket = Ticket(0, 0, 0, 0, 0, 4)
    metrics.started(0.0, ticket)
    metrics.refused(1.0, ticket)
    assert [row["drop_share"] for row in snapshot(metrics)["workers"]["rows"]] == [0.1, 0.0, 0.0]


def test_a_run_that_was_stopped_is_as_far_as_it_is() -> None:
    metrics = LiveMetrics()
    begin(metrics)
    round_of(metrics, 0)
    metrics.ended(1.0, 1, "stopped by SIGINT", None)
    assert (metrics.share(), metrics.expected_updates) == (0.1, 10)


def test_arrivals_beyond_a_fixed_quorum_are_not_counted() -> None:
    """They are seen only where they come together with the last of the quorum, which is where a round was quick."""
    metrics = LiveMetrics()
    begin(metrics)
    round_of(metrics, 0)
    tickets = [Ticket(3 + worker, worker, 0, 1, 3 + worker, 4) for worker in range(3)]
    for ticket in tickets:
        metrics.started(1.0, ticket)
    for ticket in tickets:
        metrics.arrived(1.25, ticket, None)
    metrics.applied(1.25, Update(2, tuple(tickets[:2]), None, "quorum", 1.0, None))
    assert snapshot(metrics)["kth_arrival_s"] == {"k": [1, 2], "mean_s": [0.25, 0.625]}


def test_a_worker_that_is_late_by_chance_is_not_called_slow() -> None:
    """Each ninth ticket takes eleven times as long; right after one, a smoothed pace would call its worker slow."""
    metrics = LiveMetrics()
    begin(metrics, policy={"name": "full-sync"})
    for version in range(40):
        full_round(metrics, version, {worker: 2.2 if (version + 3 * worker) % 9 == 0 else 0.2 for worker in range(3)})
        if version > 10:
            kinds = [one["kind"] for one in snapshot(metrics)["findings"]]
            assert kinds == ["even", "chance"]
