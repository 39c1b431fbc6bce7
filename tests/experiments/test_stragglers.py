"""The study of stragglers: its pieces, and from end to end in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from experiments.common.command import main
from experiments.stragglers import measured, published, simulated
from experiments.stragglers.__main__ import EXPERIMENT
from experiments.stragglers.choosing import by_seed, choice, estimated_hours, time_to_target
from experiments.stragglers.measured import Processes, busy_neighbours
from experiments.stragglers.simulated import MEAN, Arrival, Rounds, kth_arrivals, quantile, run_rounds
from experiments.stragglers.tables import measured_splits, relative_arrivals
from experiments.stragglers.worlds import MEASURED, WORLDS

import quorate
from quorate.latency import order_statistic_mean, parse_latency
from quorate.metrics import KthArrivals

FULL = Rounds("exponential, mild", 10, 10, "cancel", 200, 1)
SPELLS = "all slow together"


def test_the_papers_figures_fit_each_other() -> None:
    for quorum, thousands in published.ITERATIONS_THOUSANDS.items():
        assert published.iterations(quorum) == pytest.approx(1000 * thousands, rel=0.04)
    hours = estimated_hours({quorum: published.MEAN_S[quorum] for quorum in (90, 95, 96, 97, 98, 99, 100)})
    assert min(hours, key=lambda quorum: hours[quorum]) == published.BEST_QUORUM
    assert all(hours[quorum] == pytest.approx(published.HOURS[quorum], rel=0.015) for quorum in hours)
    assert all(len(one) == len(published.LEVELS) for one in published.TIME_QUANTILES_S.values())


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_is_one_that_the_library_knows(world: str) -> None:
    parse_latency(WORLDS[world].latency).sampler(1, 20)


def test_every_kth_arrival_is_there_and_has_its_mean() -> None:
    rows = run_rounds(replace(FULL, rounds=4000))
    assert [row.k for row in rows] == [1, 5, 6, 7, 8, 9, 10]  # the later half, and what was published
    law = parse_latency(WORLDS[FULL.world].latency)
    for row in rows:
        assert row.seconds == pytest.approx(order_statistic_mean(law, 10, row.k), rel=0.01)


@pytest.mark.parametrize("world", [MEASURED, "a few slow for a while"])
@pytest.mark.parametrize("quorum", [10, 8])
def test_sorted_draws_are_the_arrivals_of_the_simulated_engine(world: str, quorum: int) -> None:
    trial = replace(FULL, world=world, quorum=quorum)
    engine = quorate.Simulated(10, WORLDS[world].latency)
    seen = KthArrivals()
    quorate.train(None, quorate.BackupSync(quorum, 10 - quorum), engine, updates=200, seed=1, recorders=(seen,))
    for ours, theirs in zip(kth_arrivals(trial), seen.times, strict=False):
        assert ours == pytest.approx(theirs)
    assert len(seen.times) == quorum


def test_the_measured_world_has_quantiles_too() -> None:
    rows = run_rounds(Rounds(MEASURED, 100, 100, "cancel", 30, 1))
    assert {row.level for row in rows if row.k == 100} == {MEAN, *map(str, published.LEVELS)}
    assert {row.level for row in rows if row.k == 60} == {MEAN}


def test_full_sync_tells_what_a_quorum_would_wait_where_late_work_is_cancelled() -> None:
    full = run_rounds(FULL)
    (alone,) = run_rounds(replace(FULL, quorum=8))
    assert alone.k == 8
    assert alone.seconds == pytest.approx(next(row.seconds for row in full if row.k == 8))
    seconds = by_seed({FULL: full}, FULL.world, "cancel")
    assert set(seconds[1]) == {1, 5, 6, 7, 8, 9, 10}


def test_what_full_sync_does_not_tell_is_taken_from_runs_of_their_own() -> None:
    full = replace(FULL, world=SPELLS)
    split = replace(full, quorum=8)
    rows = [Arrival(k, MEAN, float(k)) for k in range(1, 11)]
    found = {full: rows, split: [Arrival(8, MEAN, 7.0)], replace(split, late="finish"): [Arrival(8, MEAN, 9.0)]}
    found[replace(full, seed=2)] = rows  # nothing to choose from
    assert by_seed(found, SPELLS, "cancel") == {1: {10: 10.0, 8: 7.0}}
    assert by_seed(found, SPELLS, "finish") == {1: {10: 10.0, 8: 9.0}}


def test_the_choice_weighs_seconds_against_updates() -> None:
    assert time_to_target({100: 2.0, 50: 1.0}) == pytest.approx({50: 0.5 * 2**0.85, 100: 1.0})
    best = choice({1: {100: 2.0, 96: 1.0, 50: 0.99}, 2: {100: 2.0, 96: 2.0, 50: 2.0}})
    assert (best.backups.lowest, best.backups.highest) == (0, 4)
    assert best.gain.highest == pytest.approx(2 * 0.96**0.85)


def test_quantiles_lie_between_values() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.75) == pytest.approx(3.0)
    assert quantile([5.0], 0.99) == 5.0


def test_splits_that_full_sync_cannot_tell_are_wanted() -> None:
    setting = simulated.Setting(seeds=1, direct_seeds=1, backups=(4,))
    trials = list(simulated.wanted(setting))
    assert len(set(trials)) == len(trials)
    direct = {trial.world for trial in trials if trial.quorum == 96 and trial.late == "cancel"}
    assert direct == {name for name, world in WORLDS.items() if world.by_the_clock}


# ---------------------------------------------------------------- real processes


def test_neighbours_are_gone_afterwards() -> None:
    with busy_neighbours(2) as neighbours:
        assert [one.poll() for one in neighbours] == [None, None]
    assert all(one.returncode is not None for one in neighbours)


def test_real_arrivals_are_shown_over_the_middle_one() -> None:
    full = Processes("pauses", 0, 4, 4, 20, 1)
    times = [Arrival(k, MEAN, seconds) for k, seconds in enumerate((1.0, 2.0, 3.0, 8.0), 1)]
    split = [Arrival(k, MEAN, seconds) for k, seconds in enumerate((1.0, 2.0, 6.0), 1)]
    found = {full: times, replace(full, quorum=3): split}
    assert relative_arrivals(found) == {("pauses", 0): [[0.5, 1.0, 1.5, 4.0]]}
    # 3 gradients in 6 s instead of 4 in 8, and twice what the third of four took.
    assert "| pauses | 0 | 1 | 1.00 | 2.00 |" in measured_splits(found)


def test_repeats_take_turns() -> None:
    trials = list(measured.wanted(measured.Setting()))
    assert [trial.repeat for trial in trials] == sorted(trial.repeat for trial in trials)


# ---------------------------------------------------------------- from end to end


@pytest.mark.experiments
def test_quick_runs_to_the_figures(tmp_path: Path) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    for name in ("arrivals.png", "choice.png", "tails.png", "measured.png", "summary.md"):
        assert (tmp_path / name).stat().st_size > 100


@pytest.mark.experiments
def test_the_committed_summary_can_be_made_again(tmp_path: Path) -> None:
    for name in ("simulated.csv", "measured.csv"):
        (tmp_path / name).write_bytes((EXPERIMENT.results / name).read_bytes())
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.md").read_text() == (EXPERIMENT.results / "summary.md").read_text()
