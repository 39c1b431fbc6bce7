"""Races to a target: how soon a training gets there, with a rate of its own, tuned on the same budget as others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import quorate
from experiments.common.curves import Point, first_reaching
from experiments.common.tuning import tuned

TUNING_SEED = 0
#: The reason that tickets have which the end of a run cuts off.
_CUT_OFF = "the run is over"


class Goal(NamedTuple):
    """What is to be reached."""

    measure: str
    target: float
    rising: bool = True

    @property
    def until(self) -> str:
        return f"{self.measure}{'>=' if self.rising else '<='}{self.target!r}"


class Finish(NamedTuple):
    """What a training came to. Seconds are those of the engine's clock: virtual, where it is simulated."""

    lr: float
    seed: int  # TUNING_SEED: one of those that chose the rate
    seconds: float  # to the goal; inf: never reached
    updates: float  # to the goal
    samples: float  # to the goal
    measure: float  # of the last version, or of the last part of the run
    drop_rate: float  # of all tickets that ended before the run did
    staleness: float  # mean, of what was applied
    diverged: int


def cluster(workers: int, latency: str, policy: quorate.Policy, together: bool = True) -> quorate.Simulated:
    """A simulated cluster; a synchronous round is one big batch there, which is the same arithmetic in less time."""
    return quorate.Simulated(workers, latency, together=together and policy.staleness_bound == 0)


def race(
    task: Any,
    policy: quorate.Policy,
    engine: quorate.Engine,
    goal: Goal,
    lr: float,
    *,
    last_share: float = 0.0,
    **options: Any,
) -> Finish:
    """Train until the goal is reached, or as long as `options` say (those of `quorate.train`).

    last_share: the share of the run's time, at its end, over which its measure is averaged (0: the last version alone).
    """
    options.setdefault("until", goal.until)
    metrics = quorate.Metrics()
    diverged = 0
    try:
        quorate.train(task, policy, engine, recorders=(metrics,), **options)
    except quorate.Diverged:
        diverged = 1
    points = [
        Point(one.version, one.time, one.samples, one.measures[goal.measure], math.nan) for one in metrics.evaluations
    ]
    reached = first_reaching(points, goal.target, goal.rising)
    begin_s = (1 - last_share) * points[-1].seconds if points else 0.0
    late = [point.measure for point in points if point.seconds >= begin_s] or [math.nan]
    last = statistics.fmean(late)
    return Finish(
        lr,
        options.get("seed", 0),
        *((math.inf,) * 3 if reached is None else (reached.seconds, float(reached.update), float(reached.samples))),
        last if math.isfinite(last) else math.nan,
        drop_rate(metrics),
        metrics.staleness_mean(),
        diverged,
    )


def drop_rate(metrics: quorate.Metrics) -> float:
    """Share of tickets that were dropped; those under way when the run ended were not, only cut off."""
    dropped = metrics.dropped_tickets - metrics.drops.get(_CUT_OFF, 0)
    return dropped / max(1, dropped + metrics.applied_tickets)


def tuned_races(
    run: Callable[[float, int], Finish],
    first_rates: Sequence[float],
    seeds: Sequence[int],
    *,
    most: int,
    rising: bool = True,
    finer: bool = False,
    worth: Callable[[Finish], float] | None = None,
) -> list[Finish]:
    """Choose a rate with the tuning seed, then run it with the others; everything that was run, in order.

    run: one race, of a rate and a seed. most: rates to try at most.
    finer: then try two more, beside the best, at a distance of √2.
    worth: how good a training of the tuning was, more is better (default: `goodness`, the sooner at the goal).
    """
    done: dict[float, Finish] = {}

    def score(rate: float) -> float:
        if rate not in done:
            done[rate] = run(rate, TUNING_SEED)
        return goodness(done[rate], rising) if worth is None else worth(done[rate])

    chosen = tuned(first_rates, rounded, score, most)[1]
    assert chosen is not None, "every rate is run when it is asked for"
    best = chosen
    if finer:
        around = [rounded(best * factor) for factor in (1.0, math.sqrt(0.5), math.sqrt(2))]
        best = max(around, key=score)
    return [*done.values(), *(run(best, seed) for seed in seeds)]


def rounded(rate: float) -> float:
    """To the digits that are written, so that a rate is found again."""
    return float(f"{rate:.4g}")


def goodness(finish: Finish, rising: bool = True) -> float:
    """More is better: sooner at the goal; those that never came there, by how far they came."""
    if math.isfinite(finish.seconds):
        return 1.0 / finish.seconds
    if finish.diverged or math.isnan(finish.measure):
        return -math.inf
    return (finish.measure if rising else -finish.measure) - 1e9


def finals(rows: Sequence[Finish]) -> list[Finish]:
    """Those with the chosen rate, one a seed."""
    return [row for row in rows if row.seed != TUNING_SEED]


def chosen_in_tuning(rows: Sequence[Finish], rising: bool = True) -> Finish:
    """The one of the tuning seed that was best: by it options of a method are chosen, so that no final seed is."""
    return max((row for row in rows if row.seed == TUNING_SEED), key=lambda row: goodness(row, rising))
