"""Contest, frontier and rate: each in seconds from end to end, and piece by piece."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.common.command import Experiment, main
from experiments.common.to_target import TUNING_SEED, Finish
from experiments.contest import settings as contest
from experiments.contest import shared
from experiments.contest.__main__ import EXPERIMENT as CONTEST
from experiments.contest.shared_results import NOISE_SAMPLES, gains
from experiments.frontier import settings as frontier
from experiments.frontier.__main__ import EXPERIMENT as FRONTIER
from experiments.frontier.racing import policy_of, rate_limit
from experiments.frontier.results import async_over_sync, standings, verdict
from experiments.pages.found import found
from experiments.rate import settings as rate
from experiments.rate.__main__ import EXPERIMENT as RATE
from experiments.rate.racing import DIGITS_BATCH, Run
from experiments.rate.results import Law, best_backups, fitted, foretold, gain_of_backups, updates_by_quorum

from quorate.latency import order_statistic_mean, parse_latency

EXPERIMENTS: tuple[Experiment, ...] = (CONTEST, FRONTIER, RATE)


@pytest.mark.experiments
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_quick_runs_from_the_trials_to_the_figures(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(experiment, ["run", "--quick", "--out", str(tmp_path)]) == 0
    *_, last = lines = capsys.readouterr().out.splitlines()
    assert "complete" in lines and Path(last).name == "summary.md"
    drawn = [Path(line) for line in lines[lines.index("complete") + 1 :]]
    assert len(drawn) >= 3 and all(file.stat().st_size > 100 for file in drawn)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_without_races_there_is_nothing_to_draw(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(experiment, ["figures", "--out", str(tmp_path)]) == 2
    assert "run first" in capsys.readouterr().err


@pytest.mark.experiments
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_the_committed_tables_can_be_made_again(experiment: Experiment, tmp_path: Path) -> None:
    for table in experiment.results.glob("*.csv"):
        (tmp_path / table.name).write_bytes(table.read_bytes())
    experiment.figures(tmp_path)
    assert (tmp_path / "summary.md").read_text() == (experiment.results / "summary.md").read_text()


# ---------------------------------------------------------------- contest


def test_every_contestant_has_as_many_rates_and_a_policy_that_fits_the_machines() -> None:
    for machines in contest.MACHINES:
        for method in contest.METHODS:
            method.policy(machines).begin(machines)
            assert len(contest.first_rates(method, machines)) == 3
    assert len(contest.all_trials()) == len(contest.METHODS) * len(contest.MACHINES) * len(contest.LATENCIES)


def test_stale_methods_begin_lower_the_more_machines_there_are() -> None:
    lowest = [contest.first_rates(contest.BY_NAME["async"], machines)[0] for machines in (16, 64)]
    assert lowest[1] == lowest[0] / 4


def test_the_gain_of_backups_at_one_rate_is_updates_times_seconds_and_that_of_another_rate_stands_apart() -> None:
    """By hand: none takes 30 updates of 8 s, 4 backups 40 of 2 s, at their own rate 20 of 2 s."""
    updates = {(0, 0.2): 60.0, (0, 0.4): 30.0, (4, 0.2): 20.0, (4, 0.4): 40.0}
    made = {}
    for (backups, lr), count in updates.items():
        for seed in (*shared.CHOOSING_SEEDS, *shared.SEEDS):
            end = Finish(lr, seed, count * (2.0 if backups else 8.0), count, 1.0, 0.9, 0.0, 0.0, 0)
            made[shared.Shared("heavy tail", backups, lr, seed)] = [end]
    none, four = gains(made, "heavy tail")
    assert (none.own_rate, none.sooner.mean, none.by_rate.mean) == (0.4, 1.0, 1.0)
    assert (four.own_rate, four.update_s) == (0.2, 2.0)
    assert [four.fewer_updates.mean, four.sooner.mean] == pytest.approx([30 / 40, 3.0])
    assert [four.by_rate.mean, four.in_all.mean] == pytest.approx([2.0, 6.0])
    law = [1 + 31 / contest.BATCH / quorum for quorum in (16, 12)]
    assert four.fewer_updates_foretold == pytest.approx(law[0] / law[1]) and four.fewer_updates_foretold < 1
    arrival = [order_statistic_mean(parse_latency("pareto:0.6,1.6"), 16, quorum) for quorum in (16, 12)]
    assert four.sooner_foretold == pytest.approx(four.fewer_updates_foretold * arrival[0] / arrival[1])


def test_the_noise_that_theory_is_given_is_the_one_that_the_rate_experiment_measured() -> None:
    law = fitted({n: one.mean for n, one in updates_by_quorum(found("rate"), "digits", 0.0).items()})
    assert round(law.doubling * DIGITS_BATCH) == NOISE_SAMPLES


# ---------------------------------------------------------------- frontier


def test_the_slowest_worker_is_as_slow_as_the_spread_says() -> None:
    draw = parse_latency(frontier.latency_text(0.1, 9.0)).sampler(0, frontier.WORKERS)
    plain = parse_latency(frontier.latency_text(0.1, 1.0)).sampler(0, frontier.WORKERS)
    assert draw(15, 0, 0, 0.0) / plain(15, 0, 0, 0.0) == pytest.approx(9.0)
    assert draw(0, 0, 0, 0.0) == plain(0, 0, 0, 0.0)


def test_what_is_staler_begins_with_lower_rates() -> None:
    one = frontier.Trial("bowl", 0.1, 1.0, 4.0, "full-sync", 0)
    soft, apart = replace(one, family="softsync", option=4), replace(one, family="async", option=1)
    assert rate_limit(one) == pytest.approx(2.0) and rate_limit(one) > rate_limit(soft) > rate_limit(apart)
    assert policy_of(soft).begin(frontier.WORKERS).per_update == 4


def finish(seed: int, seconds: float, lr: float = 0.1) -> Finish:
    return Finish(lr, seed, seconds, 10.0, 10.0, 0.01, 0.0, 0.0, 0)


def test_a_cell_goes_to_who_is_first_and_the_option_is_chosen_by_the_tuning_seed() -> None:
    cell = ("bowl", 0.1, 1.0, 4.0)

    def rows(tuning_s: float, *seconds: float) -> list[Finish]:
        ends = [finish(seed, one) for seed, one in enumerate(seconds, start=1)]
        return [finish(TUNING_SEED, tuning_s), *ends]

    found = {
        frontier.Trial(*cell, "full-sync", 0): rows(9, 9, 10, 11),
        frontier.Trial(*cell, "backup", 1): rows(8, 6, 6, 6),
        frontier.Trial(*cell, "backup", 2): rows(7, 8, 8, 8),
        frontier.Trial(*cell, "softsync", 4): rows(5, 4, 5, 6),
        frontier.Trial(*cell, "async", 1): rows(4, 3, 4, 5),
    }
    placed = standings(found, cell)
    assert placed["backup"].option == 2
    first = verdict(placed)
    assert (first.winner.family, first.second.family) == ("async", "softsync")
    assert first.ratio == pytest.approx(1.25) and not first.is_clear
    assert async_over_sync(placed) == pytest.approx(2.0)


# ---------------------------------------------------------------- rate


def test_the_law_is_found_again_from_its_points() -> None:
    law = Law(50.0, 16.0)
    found = fitted({quorum: law.updates(quorum) for quorum in rate.QUORUMS})
    assert found.least == pytest.approx(50.0, rel=0.01) and found.doubling == pytest.approx(16.0, rel=0.01)


def test_backups_are_as_many_as_pay() -> None:
    kth = [1.0, 1.0, 1.0, 10.0]
    choice = best_backups(kth, Law(1.0, 4.0).updates)
    assert (choice.backups, choice.low, choice.high) == (1, 1, 1)
    assert choice.speed_up == pytest.approx(10 * 2 / (1 + 4 / 3))
    assert gain_of_backups(kth, Law(1.0, 4.0).updates)[1] == (1, pytest.approx(choice.speed_up))


def test_seconds_are_foretold_by_updates_times_the_arrival() -> None:
    trial = rate.Trial("bowl", 16.0, 2, "0 1")
    runs = [Run(b, 0.1, seed, 30.0 - b, 20.0, 40.0, 0.01, 0) for b in (0, 1) for seed in (1, 2, 3)]
    kth = {("chen2016", 2): [1.0, 1.6], ("chen2016", 3): [0.9, 1.4, 2.0]}
    assert foretold({trial: runs}, kth, "chen2016") == [
        (2, 0, 30.0, pytest.approx(32.0)),
        (2, 1, 29.0, pytest.approx(28.0)),
    ]


def test_every_cell_of_the_grid_has_its_arrivals_timed() -> None:
    timed = {one.workers for one in rate.all_timed() if one.latency == rate.LATENCY}
    for trial in rate.all_trials():
        if trial.task == "bowl":
            assert {trial.quorum + backups for backups in trial.numbers_of_backups} <= timed
    assert math.prod(map(len, (rate.QUORUMS, rate.BACKUPS))) == 48
