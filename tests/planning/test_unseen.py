"""What a run that cancels late work does not show, and how it is guessed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quorate.errors import BadInput
from quorate.planning import plan
from quorate.planning.censoring import fill_in
from tests.planning.worlds import exponential, measured, record

WHOLE = (slice(0, 2000),)


def cut(seconds: np.ndarray, quorum: int) -> tuple[np.ndarray, np.ndarray]:
    """What a run with this quorum shows: later arrivals are cancelled when the quorum is there."""
    close = np.sort(seconds, axis=1)[:, quorum - 1 : quorum]
    return np.minimum(seconds, close), seconds <= close


def test_cancelled_work_is_lengthened_to_what_it_needed_on_average() -> None:
    seconds = exponential(2000, 8)
    shown, observed = cut(seconds, 6)
    filled, unknown = fill_in(shown, observed, WHOLE, np.random.default_rng(0))
    assert not unknown and (filled >= shown - 1e-6).all()
    assert np.sort(filled, axis=1).mean(axis=0) == pytest.approx(np.sort(seconds, axis=1).mean(axis=0), rel=0.05)


def test_rounds_that_close_at_two_instants_alike_have_no_instant_between_them() -> None:
    seconds = np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]] * 20)
    observed = np.array([[True, True, False]] * 40)
    filled, unknown = fill_in(seconds, observed, (slice(0, 40),), np.random.default_rng(0))
    assert not np.isnan(filled).any() and unknown == [2]


def test_one_who_never_finishes_is_last_and_said_to_be_unknown() -> None:
    seconds = exponential(500, 4)
    seconds[:, 2] *= 10
    shown, observed = cut(seconds, 3)
    filled, unknown = fill_in(shown, observed, (slice(0, 500),), np.random.default_rng(0))
    assert unknown == [2]
    assert (filled[:, 2] == filled.max(axis=1)).all()


def test_equal_times_are_not_taken_for_slow_ones(tmp_path: Path) -> None:
    """Two of eight are cancelled in each round though they would have arrived at the same instant."""
    made = plan(record(tmp_path / "run", "pause:0.05,0.05,10", 6, 2, 3000))
    assert made.splits[6].mean == pytest.approx(measured("pause:0.05,0.05,10", 7, 1, 3000), rel=0.15)
    assert made.recommendation.quorum == 6


def test_a_cluster_without_any_spread(tmp_path: Path) -> None:
    made = plan(record(tmp_path / "run", "constant:0.05", 6, 2, 100))
    assert [split.mean for split in made.splits] == pytest.approx([0.05] * 8)
    assert made.recommendation.backups == 0 and not made.slow and not made.fits


def test_a_run_that_does_not_wait_is_noted(tmp_path: Path) -> None:
    made = plan(record(tmp_path / "run", "shifted-exp:0.05,0.02", 6, 2, 200))
    assert any("waited for 6 of 8" in note for note in made.cautions)
    made = plan(record(tmp_path / "slow", "shifted-exp:0.05,0.01*slow:3=9", 7, 1, 200))
    assert any("worker 3 hardly ever finished" in note for note in made.cautions)
    assert made.recommendation.quorum <= 7
    assert [(slow.worker, slow.is_bound) for slow in made.slow] == [(3, True)]


def test_lost_workers_leave_gaps_that_are_filled(tmp_path: Path) -> None:
    import quorate

    engine = quorate.Simulated(4, "shifted-exp:0.05,0.02", faults="lose:1@2;join:1@6;lose:2@8")
    quorate.train(None, quorate.BackupSync(3, 1), engine, updates=200, out=tmp_path / "run")
    made = plan(tmp_path / "run")
    assert made.machines == 4 and made.rounds >= 190
    assert all(0.05 <= split.mean < 0.3 for split in made.splits)


def test_a_run_in_which_nobody_is_seen_often_enough_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no worker finished often enough.*; record a longer run"):
        plan(record(tmp_path / "run", "shifted-exp:0.05,0.02", 1, 7, 25))


def test_rounds_of_which_only_some_were_cut_short_are_noted(tmp_path: Path) -> None:
    import quorate

    engine = quorate.Simulated(8, "shifted-exp:0.05,0.02")
    quorate.train(None, quorate.Deadline(), engine, updates=300, out=tmp_path / "run")
    assert any("waited for 7 of 8 arrivals in" in note for note in plan(tmp_path / "run").cautions)


def test_fewer_machines_are_taken_from_those_that_were_seen(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "shifted-exp:0.05,0.01*slow:3=9", 7, 1, 200)
    made = plan(run, machines=4)
    assert made.recommendation.speedup is not None and made.recommendation.speedup >= 1 and not made.slow
    real = measured("shifted-exp:0.05,0.01", 4, 0, 600)
    assert made.splits[-1].mean == pytest.approx(real, rel=0.05)
    assert plan(run, machines=7).splits[-1].mean == pytest.approx(
        measured("shifted-exp:0.05,0.01", 7, 0, 600), rel=0.05
    )


def test_communication_of_cancelled_work_is_taken_off_too(tmp_path: Path) -> None:
    """The same network as in the run changes nothing, also for splits that wait for what the run cancelled."""
    import quorate

    network = "bandwidth=1Gbps,latency=1ms"
    engine = quorate.Simulated(8, "shifted-exp:0.05,0.02", network=network, model_bytes=1_000_000)
    quorate.train(None, quorate.BackupSync(6, 2), engine, updates=200, out=tmp_path / "run")
    made = plan(tmp_path / "run", what_if=[network, f"machines=9,{network}"])
    ((_, same), (_, one_more)) = made.what_if
    assert [split.mean for split in same.splits] == pytest.approx([split.mean for split in made.splits], rel=0.01)
    assert one_more.splits[0].mean == pytest.approx(made.splits[0].mean, rel=0.02)


def test_a_gain_over_what_was_not_seen_is_not_named(tmp_path: Path) -> None:
    """Worker 1 never arrives first: how long both take has only a lower bound, the time of the first."""
    found = plan(record(tmp_path / "run", "shifted-exp:0.05,0.02*slow:1=9", 1, 1, 100)).recommendation
    assert found.quorum == 1 and found.speedup is None
    assert "takes longer than the run shows" in found.reason and "not seen" in found.changes[-1]


def test_workers_that_never_finished_anything_are_left_out(tmp_path: Path) -> None:
    import quorate

    engine = quorate.Simulated(5, "shifted-exp:0.05,0.02", faults="lose:1@0.01;lose:2@0.02")
    quorate.train(None, quorate.BackupSync(3, 2), engine, updates=100, out=tmp_path / "run")
    made = plan(tmp_path / "run")
    assert made.machines == 3 and any("workers 1, 2 never finished a ticket" in note for note in made.notes)
