"""Rounds of many workers in virtual time, without gradients: when the k-th arrives, what a quorum's update takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import quorate
from experiments.stragglers.published import LEVELS, MEAN_S, TIME_QUANTILES_S
from experiments.stragglers.worlds import MEASURED, WORLDS
from quorate.latency import parse_latency

MEAN = "mean"


@dataclass(frozen=True)
class Rounds:
    """One run. With all workers for a quorum it is full sync, which shows every k-th arrival."""

    world: str
    machines: int
    quorum: int
    late: str  # what becomes of late work: "cancel", or "finish" as in the paper
    rounds: int
    seed: int


class Arrival(NamedTuple):
    """Seconds from a version to its k-th gradient: their mean, or what so large a share of rounds stays within."""

    k: int
    level: str  # "mean", or the share as a text
    seconds: float


@dataclass(frozen=True)
class Setting:
    """How much is run."""

    machines: int = 100
    rounds: int = 500
    seeds: int = 20
    direct_seeds: int = 4  # of the splits that full sync cannot tell
    backups: tuple[int, ...] = (1, 2, 4, 6, 10, 20)
    worlds: tuple[str, ...] = tuple(WORLDS)


QUICK = Setting(machines=20, rounds=30, seeds=2, direct_seeds=2, backups=(1, 4))


def wanted(setting: Setting) -> Iterator[Rounds]:
    """Full sync of every world, then the splits that full sync cannot tell."""
    n = setting.machines
    for world in setting.worlds:
        for seed in range(1, setting.seeds + 1):
            yield Rounds(world, n, n, "cancel", setting.rounds, seed)
    for world in setting.worlds:
        for late in ("finish", "cancel") if WORLDS[world].by_the_clock else ("finish",):
            for backups in setting.backups:
                for seed in range(1, setting.direct_seeds + 1):
                    yield Rounds(world, n, n - backups, late, setting.rounds, seed)


def run_rounds(trial: Rounds) -> list[Arrival]:
    """The mean of the k-th arrivals in full sync, of the quorum's otherwise; for the measured world quantiles too."""
    if trial.late == "finish":
        return [Arrival(trial.quorum, MEAN, _update_s(trial))]
    times = kth_arrivals(trial)
    if trial.quorum < trial.machines:
        return [Arrival(trial.quorum, MEAN, statistics.fmean(times[trial.quorum - 1]))]
    found = [Arrival(k, MEAN, statistics.fmean(one)) for k, one in enumerate(times, 1) if is_kept(k, trial.machines)]
    if trial.world == MEASURED:
        for k in TIME_QUANTILES_S:
            if k <= trial.machines:
                ordered = sorted(times[k - 1])
                found += [Arrival(k, str(level), quantile(ordered, level)) for level in LEVELS]
    return found


def is_kept(k: int, machines: int) -> bool:
    """Whether the table has the k-th arrival: the later half, where quorums are chosen, and what was published."""
    return k >= machines // 2 or k in MEAN_S


def kth_arrivals(trial: Rounds) -> list[list[float]]:
    """Seconds until the k-th arrival at index k-1, of every round.

    Where late work is cancelled all workers begin each round together, so sorting a round's draws is all there is to
    do; a run of the simulated engine has the same arrivals (a test holds it to that), and takes several times as long.
    """
    draw = parse_latency(WORLDS[trial.world].latency).sampler(trial.seed, trial.machines)
    times: list[list[float]] = [[] for _ in range(trial.machines)]
    now = 0.0
    for number in range(trial.rounds):
        ordered = sorted(draw(worker, number, number, now) for worker in range(trial.machines))
        now += ordered[trial.quorum - 1]
        for one, seconds in zip(times, ordered, strict=True):
            one.append(seconds)
    return times


def _update_s(trial: Rounds) -> float:
    """Mean seconds of an update in the simulated engine, which knows who is still busy with old work."""
    policy = quorate.BackupSync(trial.quorum, trial.machines - trial.quorum, late=trial.late)
    engine = quorate.Simulated(trial.machines, WORLDS[trial.world].latency)
    metrics = quorate.train(None, policy, engine, updates=trial.rounds, seed=trial.seed).metrics
    return metrics.seconds / metrics.updates


def quantile(ordered: list[float], level: float) -> float:
    """What a share `level` of the values stays within, in a straight line between two of them."""
    place = level * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
