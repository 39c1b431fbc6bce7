"""Virtual time is right: against the paper's table, closed forms, and hand-made cases."""

from __future__ import annotations

import math

import pytest

import quorate
from quorate.latency import Latency, order_statistic_mean, parse_latency
from quorate.metrics import KthArrivals
from tests.latency.test_latency_chen2016 import LEVELS, TABLE


def mean_update(policy: quorate.Policy, workers: int, latency: str | Latency, updates: int, seed: int = 0) -> float:
    result = quorate.train(None, policy, quorate.Simulated(workers, latency), updates=updates, seed=seed)
    mean = result.summary["update_seconds"]["mean"]
    assert isinstance(mean, float)
    return mean


def test_full_sync_under_chen2016_reproduces_the_papers_table() -> None:
    arrivals, engine = KthArrivals(), quorate.Simulated(100, "chen2016")
    result = quorate.train(None, quorate.FullSync(), engine, updates=10_000, recorders=(arrivals,))
    assert result.summary["update_seconds"]["mean"] == pytest.approx(2.62, rel=0.03)
    for k, row in TABLE.items():
        times = sorted(arrivals.times[k - 1])
        measured = [times[math.ceil(level * len(times)) - 1] for level in LEVELS]
        measured.append(sum(times) / len(times))
        for level, ours, paper in zip((*LEVELS, "mean"), measured, row, strict=True):
            assert ours == pytest.approx(paper, rel=0.03), f"k={k}, {level}"


def test_chen2016_update_times_at_96_plus_4() -> None:
    assert mean_update(quorate.BackupSync(96, 4), 100, "chen2016", 3000) == pytest.approx(1.74, rel=0.02)


@pytest.mark.parametrize("law", ["shifted-exp:0.05,0.025", "pareto:1,3", "lognormal:1,0.5", "pause:0.05,0.04,10"])
@pytest.mark.parametrize(("quorum", "backups"), [(8, 0), (6, 2), (10, 10), (1, 7), (30, 2)])
def test_update_times_match_the_order_statistics(law: str, quorum: int, backups: int) -> None:
    n = quorum + backups
    expected = order_statistic_mean(parse_latency(law), n, quorum)
    heavy = law.startswith("pareto") and n <= 8  # such a tail takes more rounds to be known within 1 %
    rounds = 40_000 if heavy else 10_000 if n <= 8 else 5000
    measured = mean_update(quorate.BackupSync(quorum, backups), n, law, rounds)
    # Two values ten-fold apart: the standard error of this many rounds is above 1 %.
    assert measured == pytest.approx(expected, rel=0.05 if law.startswith("pause") else 0.01)


def test_k_batch_sync_matches_its_closed_form() -> None:
    """Exponential: K/(nμ)."""
    measured = mean_update(quorate.KBatchSync(10), 8, "shifted-exp:0,1", 20_000)
    assert measured == pytest.approx(10 / 8, rel=0.01)


def test_async_applies_as_fast_as_workers_deliver() -> None:
    assert mean_update(quorate.Async(), 8, "shifted-exp:0.5,0.5", 50_000) == pytest.approx(1 / 8, rel=0.01)


def test_late_work_left_to_finish_makes_rounds_slower_than_cancelling() -> None:
    law = "pause:0.05,0.04,10"
    cancelled = mean_update(quorate.BackupSync(6, 2), 8, law, 5000)
    finished = mean_update(quorate.BackupSync(6, 2, late="finish"), 8, law, 5000)
    assert finished > 1.1 * cancelled


def test_two_policies_on_one_seed_meet_the_same_slow_workers() -> None:
    """Full sync's k-th arrivals and backup's are of the same draws, round by round."""
    full, backup = KthArrivals(), KthArrivals()
    engine = quorate.Simulated(8, "lognormal:1,1")
    quorate.train(None, quorate.FullSync(), engine, updates=50, seed=9, recorders=(full,))
    quorate.train(None, quorate.BackupSync(6, 2), engine, updates=50, seed=9, recorders=(backup,))
    assert backup.times[:6] == [[pytest.approx(time) for time in times] for times in full.times[:6]]


def test_a_network_adds_its_time() -> None:
    """1 MB at 10 MB/s to and fro is 0.2 s; at a server of 20 MB/s four workers queue for 0.2 s each way."""
    mega = 1_000_000

    def mean(network: str) -> float:
        engine = quorate.Simulated(4, "constant:1", network=network, model_bytes=mega)
        return quorate.train(None, quorate.FullSync(), engine, updates=10).summary["update_seconds"]["mean"]

    assert mean("bandwidth=10MB/s") == pytest.approx(1.2)
    assert mean("bandwidth=80Mbps") == pytest.approx(1.2)
    assert mean("bandwidth=10MB/s,latency=50ms") == pytest.approx(1.3)
    # The server sends 4 × 50 ms one after the other; the gradients come in as they went out, 50 ms apart.
    assert mean("server=20MB/s") == pytest.approx(1 + 0.2 + 0.05)


def test_a_network_splits_time_into_parts() -> None:
    result = quorate.train(
        None,
        quorate.FullSync(),
        quorate.Simulated(2, "constant:1", network="bandwidth=10MB/s", model_bytes=1_000_000),
        updates=3,
    )
    assert result.summary["bytes"] == {"sent": 12_000_000, "used": 12_000_000, "wasted": 0}
    assert result.summary["seconds"] == pytest.approx(3 * 1.2)


def test_equal_seeds_give_equal_times_and_other_seeds_others() -> None:
    def run(seed: int) -> object:
        return quorate.train(
            None, quorate.BackupSync(6, 2), quorate.Simulated(8, "lognormal:1,1"), updates=200, seed=seed
        ).summary

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_memory_stays_flat_under_the_heaviest_tails() -> None:
    """Cancelled tickets that would have ended in a thousand years must not pile up."""
    engine = quorate.Simulated(8, "pareto:1,0.4")
    quorate.train(None, quorate.BackupSync(4, 4), engine, updates=20_000)
    assert len(engine._heap) < 5000
