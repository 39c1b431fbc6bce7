"""Workers that leave and come back."""

from __future__ import annotations

import pytest

import quorate
from quorate.faults import Fault, parse_faults


def test_backups_make_the_loss_of_a_worker_cost_nothing() -> None:
    def run(faults: str | None) -> float:
        engine = quorate.Simulated(8, "constant:1", faults=faults)
        return quorate.train(None, quorate.BackupSync(6, 2), engine, updates=20).summary["seconds"]

    assert run("lose:0@3.5;lose:5@3.5") == run(None) == 20


def test_full_sync_waits_for_a_worker_to_return() -> None:
    engine = quorate.Simulated(3, "constant:1", faults="lose:1@2.5;join:1@10")
    result = quorate.train(None, quorate.FullSync(), engine, updates=4)
    assert result.summary["seconds"] == 12
    assert result.summary["tickets"]["lost"] == 1


def test_below_the_quorum_there_is_a_clear_error_within_the_time_set() -> None:
    engine = quorate.Simulated(4, "constant:1", faults="lose:0@2.5;lose:1@2.6;join:0@500")
    with pytest.raises(quorate.QuorumLost, match=r"needs 3 live workers, but only 2 of 4 .* within 60 s"):
        quorate.train(None, quorate.BackupSync(3, 1), engine, updates=100, patience_s=60)
    engine = quorate.Simulated(4, "constant:1", faults="lose:0@2.5;lose:1@2.6;join:0@50")
    assert quorate.train(None, quorate.BackupSync(3, 1), engine, updates=100, patience_s=60).summary["updates"] == 100


def test_when_everybody_is_gone_for_good_the_run_ends_with_a_sentence() -> None:
    engine = quorate.Simulated(2, "constant:1", faults="lose:0@2.5;lose:1@2.5")
    with pytest.raises(quorate.QuorumLost, match="only 0 of 2"):
        quorate.train(None, quorate.Async(), engine, updates=100)


def test_a_new_worker_may_join() -> None:
    engine = quorate.Simulated(2, "lognormal:1,0.0001*pauses:0,2", faults="join:2@0.5;join:3@0.5")
    result = quorate.train(None, quorate.Async(), engine, updates=40)
    assert result.summary["seconds"] == pytest.approx(10.5, abs=0.6)
    assert set(result.metrics.workers) == {0, 1, 2, 3}


def test_random_crashes_are_the_same_for_the_same_seed() -> None:
    faults = parse_faults("crash:10,2")

    def first(seed: int) -> list[Fault]:
        sequence = faults.crashes(seed, worker=3)
        return [next(sequence) for _ in range(6)]

    assert first(1) == first(1) != first(2)
    assert [fault.kind for fault in first(1)] == ["lose", "join"] * 3
    times = [fault.time for fault in first(1)]
    assert times == sorted(times)


def test_an_arrival_of_an_older_life_is_refused() -> None:
    """The worker is lost and back before its ticket would have ended; that ticket must not come in."""
    engine = quorate.Simulated(1, "constant:10", faults="lose:0@1;join:0@2")
    result = quorate.train(None, quorate.Async(), engine, updates=1)
    assert result.summary["seconds"] == 12
    assert result.summary["tickets"]["lost"] == 1


@pytest.mark.parametrize("text", ["lose:3", "lose:x@3", "crash:0,1", "explode:1@2", "join:1@-2"])
def test_faults_that_do_not_parse_are_refused(text: str) -> None:
    with pytest.raises(quorate.BadInput, match="lose:3@10"):
        quorate.Simulated(4, faults=text)


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_a_learned_deadline_goes_on_without_a_worker_that_never_returns(late: str) -> None:
    """Lost while the limit is still being learned, when rounds wait for everybody."""
    engine = quorate.Simulated(8, "pause:1,0.05,10", faults="lose:0@1.5")
    result = quorate.train(None, quorate.Deadline(late=late), engine, updates=50)
    assert result.summary["updates"] == 50


def test_a_worker_is_not_started_twice_after_its_arrival_was_held() -> None:
    engine = quorate.Simulated(4, "constant:1", faults="crash:5,0")
    result = quorate.train(
        None, quorate.Async(max_staleness=0), engine, samples=1438, batch_size=16, epochs=4, seed=309
    )
    assert result.summary["samples"]["applied"] == 4 * 1438


def test_a_worker_that_returns_reads_its_version_again() -> None:
    engine = quorate.Simulated(1, "constant:1", network="bandwidth=1B/s", model_bytes=1, faults="lose:0@1.5;join:0@1.6")
    result = quorate.train(None, quorate.FullSync(), engine, updates=1)
    assert result.summary["seconds"] == pytest.approx(4.6)
