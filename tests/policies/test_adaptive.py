"""AdaptiveBackup's quorum is right if the answer is known, steady if the cluster is, and quick to follow a change."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

import quorate
from quorate.events import Arrived, Choose, Learned, Ticket, WorkerJoined
from quorate.policies import AdaptiveBackup
from quorate.policies.arrival_times import (
    excess,
    gaps,
    has_changed,
    has_slowed,
    mean_wait,
    means,
    patience,
    places_of,
)
from quorate.trace import Recorder, Update, read_trace
from tests.toy_tasks import Toy

# ---------------------------------------------------------------- times of arrivals


def test_every_number_is_a_place_until_there_are_very_many() -> None:
    assert places_of(1) == [1]
    assert places_of(32) == list(range(1, 33))
    for workers in (49, 100, 10_000):
        places = places_of(workers)
        assert places == sorted(set(places)) and len(places) < 90
        assert places[0] == 1 and places[-4:] == [workers - 3, workers - 2, workers - 1, workers]


def test_a_round_that_closed_says_nothing_of_what_would_have_come() -> None:
    closed_at_two = [2.0, 1.5, 1.0, 1.5]
    first, second, third = gaps([closed_at_two] * 3, 3)
    assert first is not None and first.mean == 1.0 and first.rounds == 3
    assert second is not None and second.mean == 0.5 and second.longest == 0.5
    assert third is None
    assert means([first, second, third], 2) == [1.0, 1.5, None]


def test_a_wait_that_was_given_up_is_longer_than_it_was() -> None:
    rounds = [[3.0, 2.0, 1.0, 1.5, 2.0], [3.0, 3.5, 1.0, 1.5]]  # the second gave up after waiting 2 s more
    third = gaps(rounds, 3)[2]
    assert third is not None and third.rounds == 2 and third.longest == 2.0
    assert third.mean == pytest.approx(
        0.5 + 0.5 * (1.5 + 2.0)
    )  # half still wait at 2 s, and are assumed to wait as long again
    assert excess(rounds, 1, 3) == ([1.0], [2.5])


def test_beyond_the_quorum_one_more_of_the_longest_wait_is_expected() -> None:
    rounds = [[2.0, 1.0, 1.0, 1.0]] * 3 + [[2.0, 5.0, 1.0, 5.0]]
    found = gaps(rounds, 2)
    assert means(found, 2) == [1.0, 2.0]
    assert means(found, 1) == [1.0, 2.0 + 4.0 / 5]


def test_the_mean_wait_is_that_of_kaplan_and_meier() -> None:
    assert mean_wait([1.0, 3.0], [2.0]) == pytest.approx(1 + 2 / 3 * 2)
    assert mean_wait([1.0, 3.0], []) == 2.0


def test_cut_off_waits_do_not_bias_the_mean() -> None:
    draws = random.Random(3)
    values = [draws.expovariate(1.0) for _ in range(4000)]
    cuts = [draws.uniform(0.2, 6.0) for _ in values]
    seen = [value for value, cut in zip(values, cuts, strict=True) if value <= cut]
    given_up = [cut for value, cut in zip(values, cuts, strict=True) if value > cut]
    assert mean_wait(seen, given_up) == pytest.approx(1.0, rel=0.07)
    assert fmean(seen) < 0.85  # the mean of the completed waits alone is biased


def test_patience_is_as_long_as_it_takes_to_see_that_it_does_not_pay() -> None:
    assert patience([], [], 0.1) == pytest.approx(0.15)
    assert patience([], [0.2] * 10, 0.1) == pytest.approx(0.15)  # the arrival never came: a shorter wait will do
    assert patience([0.0] * 9, [0.3], 0.1) == pytest.approx(1.5)  # one in ten would have to take so long
    assert patience([0.0] * 9 + [9.0], [], 0.1) == pytest.approx(1.5)
    assert patience([0.0] * 9, [], 0.1) == pytest.approx(1.5)  # no arrival was late yet, but one in ten may be


def test_a_change_is_seen_and_chance_is_not() -> None:
    draws = random.Random(4)
    alarms = 0
    for _ in range(300):
        times = [draws.paretovariate(1.5) for _ in range(200)]
        alarms += has_slowed(times, 8) + has_changed(times, 24)
    assert alarms == 0
    assert has_slowed([*times, 1e3, 1.0, 1e3, 2e3, 1.0, 3e3, 1e3, 1e3], 8)
    assert has_changed([*times, *[value + 1.5 for value in times[:24]]], 24)
    assert has_changed([*times, *[value / 3 for value in times[:24]]], 24)


def test_rounding_is_no_change() -> None:
    times = [0.05 + 1e-15 * place for place in range(200)]
    assert not has_changed(times, 24) and not has_slowed(times, 8)


# ---------------------------------------------------------------- choices


class Choices(Recorder):
    """Every choice, and the number of gradients of each version."""

    def __init__(self) -> None:
        self.quorums: list[tuple[int, int]] = []  # version, quorum
        self.reasons: list[str] = []
        self.counts: list[int] = []
        self.why: list[str] = []
        self.seconds = 0.0

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        self.quorums.append((version, quorum))
        self.reasons.append(reason)

    def applied(self, time: float, update: Update) -> None:
        self.counts.append(len(update.tickets))
        self.why.append(update.reason)
        self.seconds = time

    def at(self, version: int) -> int:
        """The quorum that was in force."""
        return [quorum for chosen, quorum in self.quorums if chosen <= version][-1]

    def gradients_per_s(self) -> float:
        return sum(self.counts) / self.seconds


def watched(policy: quorate.Policy, workers: int, latency: str, updates: int, **rest: str) -> Choices:
    watch = Choices()
    engine = quorate.Simulated(workers, latency, **rest)  # type: ignore[arg-type]
    samples = 2 * workers * updates
    quorate.train(None, policy, engine, updates=updates, samples=samples, batch_size=1, recorders=(watch,))
    return watch


def test_one_slow_worker_is_done_without() -> None:
    watch = watched(AdaptiveBackup(), 4, "constant:0.05*slow:2=4", 100)
    assert watch.quorums[0] == (0, 4) and watch.quorums[1:] == [(5, 3)]
    assert "3 of 4: 60 gradients/s against" in watch.reasons[1]
    assert "noise scale unknown" in watch.reasons[1]


def test_nobody_is_left_out_where_all_are_alike() -> None:
    watch = watched(AdaptiveBackup(), 4, "constant:0.05", 60)
    assert {quorum for _, quorum in watch.quorums} == {4} and set(watch.counts) == {4}


@pytest.mark.parametrize("latency", ["pause:0.05,0.05,10", "shifted-exp:0.05,0.025", "pareto:0.05,1.5"])
def test_it_is_nearly_as_good_as_the_best_split(latency: str) -> None:
    workers, updates = 6, 600
    splits = [
        watched(quorate.BackupSync(quorum, workers - quorum), workers, latency, updates).gradients_per_s()
        for quorum in range(1, workers + 1)
    ]
    ours = watched(AdaptiveBackup(), workers, latency, updates)
    assert ours.gradients_per_s() > 0.94 * max(splits)
    assert min(splits) < 0.9 * max(splits)  # else any choice would be as good


@pytest.mark.parametrize("latency", ["pause:0.05,0.05,10", "lognormal:0.05,0.4", "pareto:0.05,1.5", "constant:1"])
def test_it_does_not_oscillate(latency: str) -> None:
    assert len(watched(AdaptiveBackup(), 6, latency, 3000).quorums) <= 8


def test_it_follows_a_cluster_that_changes_both_ways() -> None:
    slow, alike = "constant:0.05*slow:0=6", "constant:0.05"
    vanishes = watched(AdaptiveBackup(), 4, f"{slow}->20->{alike}", 800)
    assert vanishes.at(300) == 3 and vanishes.at(799) == 4
    appears = watched(AdaptiveBackup(), 4, f"{alike}->20->{slow}", 800)
    assert appears.at(300) == 4 and appears.at(799) == 3
    assert any("the cluster has changed" in reason for reason in appears.reasons)
    # It is noticed within a few rounds: 0.3 s each instead of 0.05 s.
    assert next(version for version, quorum in appears.quorums if version > 300 and quorum == 3) < 430


def test_the_noise_scale_decides_what_a_gradient_is_worth() -> None:
    latency = "shifted-exp:0.05,0.05"
    most = watched(AdaptiveBackup(noise_scale=1e9), 6, latency, 300).at(299)
    some = watched(AdaptiveBackup(noise_scale=2.0), 6, latency, 300).at(299)
    none = watched(AdaptiveBackup(noise_scale=0.0), 6, latency, 300).at(299)
    assert none == 1 < some < most
    assert most == watched(AdaptiveBackup(), 6, latency, 300).at(299)


def test_the_least_quorum_is_kept() -> None:
    watch = watched(AdaptiveBackup(noise_scale=0.0, min_quorum=3), 6, "shifted-exp:0.05,0.05", 200)
    assert watch.at(199) == 3 and min(watch.counts) == 3


def test_without_exploring_no_round_looks_further() -> None:
    latency = "shifted-exp:0.05,0.05"
    still = watched(AdaptiveBackup(explore=0.0), 6, latency, 300)
    assert set(still.why[5:]) == {"quorum reached"}
    looks = [
        why for why in watched(AdaptiveBackup(explore=0.05), 6, latency, 300).why if why.startswith("looked further")
    ]
    assert 10 < len(looks) < 120


def test_what_a_look_brings_is_used() -> None:
    watch = watched(AdaptiveBackup(), 6, "shifted-exp:0.05,0.05", 300)
    beyond = [count for version, count in enumerate(watch.counts) if count > watch.at(version)]
    assert beyond and max(beyond) <= 6


def test_it_goes_on_with_whoever_is_left() -> None:
    faults = "lose:1@5;lose:2@6;lose:3@7;join:2@12"
    watch = watched(AdaptiveBackup(), 4, "constant:0.1", 200, faults=faults)
    assert watch.counts[:49] == [4] * 49
    assert watch.counts[90:110] == [1] * 20  # a lone survivor
    assert watch.counts[-20:] == [2] * 20
    assert any(reason.startswith("1 of 1: ") for reason in watch.reasons)


def test_many_workers_are_no_burden() -> None:
    watch = watched(AdaptiveBackup(), 300, "shifted-exp:0.05,0.025*slow:7=9", 60)
    assert 200 < watch.at(59) < 300


# ---------------------------------------------------------------- events, checkpoints, traces


def test_it_hears_of_the_noise_scale_only_if_none_was_given() -> None:
    for given, expected in ((None, 77.0), (5.0, 5.0)):
        policy = AdaptiveBackup(given).begin(2)
        assert list(policy.handle(Learned(1.0, 4, 77.0))) == []
        assert policy.state()["_noise"] == expected


def test_a_choice_comes_before_the_round_it_is_for() -> None:
    policy = AdaptiveBackup().begin(1)
    actions = list(policy.handle(WorkerJoined(0.0, 0)))
    assert isinstance(actions[0], Choose) and actions[0].quorum == 1
    ticket = Ticket(0, 0, 0, 0, 0, 1)
    assert not any(isinstance(action, Choose) for action in policy.handle(Arrived(1.0, ticket)))


def test_its_state_stays_small_enough_to_save() -> None:
    policy = AdaptiveBackup().begin(32)
    for row in range(1000):
        policy._rounds.append([32.0, 1.0, *[row / 7] * 32])
    assert len(json.dumps(policy.state())) < 500_000


def test_the_noise_scale_is_learned_from_gradients(tmp_path: Path) -> None:
    engine = quorate.Simulated(4, "shifted-exp:0.05,0.05")
    quorate.train(Toy(samples=400), AdaptiveBackup(), engine, epochs=12, out=tmp_path / "run")
    reasons = [record["reason"] for record in read_trace(tmp_path / "run") if record["event"] == "choose"]
    assert "noise scale unknown" in reasons[1] or "samples, 8 a gradient" in reasons[1]
    assert any("noise-free steps/s" in reason and "samples, 8 a gradient" in reason for reason in reasons)
    assert quorate.replay(tmp_path / "run", Toy(samples=400)).gradients
    assert not quorate.replay(tmp_path / "run", gradients=False).gradients


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("updates", [17, 33, 20])  # the first two end with a `Learned` event still pending
def test_a_resumed_run_is_one_run(updates: int, tmp_path: Path) -> None:
    task = Toy(samples=400)
    engine = quorate.Local(3, latency="shifted-exp:0.002,0.002")
    quorate.train(task, AdaptiveBackup(), engine, updates=updates, out=tmp_path / "run")
    result = quorate.resume(tmp_path / "run", task, updates=60)
    assert result.summary["updates"] == 60
    assert quorate.replay(tmp_path / "run", task).result.digest == result.digest
