"""From races and arrivals to the questions: the law of updates, what b does to it, and which b is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.common.spread import Spread, spread_of
from experiments.common.to_target import TUNING_SEED
from experiments.common.trials import Found
from experiments.rate.racing import Arrival, Run
from experiments.rate.settings import Timed, Trial

Kth = dict[tuple[str, int], list[float]]  # (latency, workers) -> mean seconds to the k-th arrival, k = 1 at index 0


class Law(NamedTuple):
    """updates = least·(1 + doubling/N), (7) of docs/theory.md."""

    least: float
    doubling: float

    def updates(self, gradients: float) -> float:
        return self.least * (1 + self.doubling / gradients)


def finals(rows: Sequence[Run], backups: int) -> list[Run]:
    return [row for row in rows if row.seed != TUNING_SEED and row.backups == backups]


def updates_by_quorum(found: Found[Trial, Run], task: str, noise: float, backups: int = 0) -> dict[int, Spread]:
    """Updates to the target, over seeds."""
    made = {}
    for trial, rows in found.items():
        ends = finals(rows, backups)
        if (trial.task, trial.noise) == (task, noise) and ends:
            made[trial.quorum] = spread_of([row.updates for row in ends])
    return dict(sorted(made.items()))


def updates_over_none(found: Found[Trial, Run], noise: float) -> dict[tuple[int, int], float]:
    """On the bowl, by (quorum, backups): mean updates over those of the same quorum without backups."""
    ratios = {}
    for trial, rows in found.items():
        if (trial.task, trial.noise) == ("bowl", noise):
            none = spread_of([row.updates for row in finals(rows, 0)]).mean
            for backups in trial.numbers_of_backups:
                if backups:
                    ratios[trial.quorum, backups] = (
                        spread_of([one.updates for one in finals(rows, backups)]).mean / none
                    )
    return dict(sorted(ratios.items()))


def fitted(points: dict[int, float]) -> Law:
    """The law that is nearest in ratio: least squares of logarithms."""

    def least_of(doubling: float) -> tuple[float, float]:
        logs = [math.log(updates / (1 + doubling / quorum)) for quorum, updates in points.items()]
        mean = sum(logs) / len(logs)
        return sum((one - mean) ** 2 for one in logs), mean

    candidates = [0.0, *(2 ** (place / 16) for place in range(-48, 193))]
    doubling = min(candidates, key=lambda one: least_of(one)[0])
    return Law(math.exp(least_of(doubling)[1]), doubling)


def kth_arrivals(arrivals: Found[Timed, Arrival]) -> Kth:
    return {(trial.latency, trial.workers): [row.mean_s for row in sorted(rows)] for trial, rows in arrivals.items()}


class Choice(NamedTuple):
    """The best number of backups of n workers; `low` to `high` are within 1 % of it."""

    backups: int
    low: int
    high: int
    speed_up: float  # over none


def best_backups(kth: Sequence[float], updates: Callable[[float], float]) -> Choice:
    """(22) of docs/theory.md: updates(N) × seconds to the N-th arrival, least over N."""
    n = len(kth)
    costs = {n - quorum: updates(quorum) * kth[quorum - 1] for quorum in range(1, n + 1)}
    best = min(costs, key=lambda b: costs[b])
    near = [b for b, cost in costs.items() if cost <= 1.01 * costs[best]]
    return Choice(best, min(near), max(near), costs[0] / costs[best])


def gain_of_backups(kth: Sequence[float], updates: Callable[[float], float]) -> list[tuple[int, float]]:
    """How many times as soon the target is reached with b of n workers as backups, against none: (b, ratio)."""
    n = len(kth)
    none = updates(n) * kth[n - 1]
    return [(n - quorum, none / (updates(quorum) * kth[quorum - 1])) for quorum in range(n, 0, -1)]


def foretold(found: Found[Trial, Run], kth: Kth, latency: str) -> list[tuple[int, int, float, float]]:
    """(quorum, backups, seconds as run, updates without backups × mean seconds to the quorum's arrival)."""
    made = []
    for trial, rows in found.items():
        without = [row.updates for row in finals(rows, 0)]
        if trial.task != "bowl" or not without:
            continue
        for backups in trial.numbers_of_backups:
            seconds = [row.seconds for row in finals(rows, backups)]
            times = kth.get((latency, trial.quorum + backups))
            if seconds and times is not None:
                product = spread_of(without).mean * times[trial.quorum - 1]
                made.append((trial.quorum, backups, spread_of(seconds).mean, product))
    return made
