"""What the trainings came to: by configuration at its tuned rate, and how soon they are at an accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.common.curves import Point, first_reaching
from experiments.common.spread import Spread, spread_of
from experiments.common.trials import Found
from experiments.inception.settings import FULL, Length, Trial, configurations, final_accuracy, tuning_of

Curves = list[list[Point]]


def finals(found: Found[Trial, Point], length: Length = FULL) -> dict[str, Curves]:
    """Every seed of each configuration, at its chosen rate."""
    return {name: by_rate(found, name, length)[rate] for name, rate in rates(found, length).items()}


def rates(found: Found[Trial, Point], length: Length = FULL) -> dict[str, float]:
    """By configuration: sync has the tuned rate, async that with the best mean test accuracy of those in full."""
    made: dict[str, float] = {}
    for one in configurations():
        there = {rate: curves for rate, curves in by_rate(found, one.name, length).items() if _all(curves, length)}
        best = tuning_of(one, found, length)[1]
        if one.method == "async" and there:
            made[one.name] = max(there, key=lambda rate: accuracy(there[rate]).mean)
        elif best is not None and best.lr in there:
            made[one.name] = best.lr
    return made


def _all(curves: Curves, length: Length) -> bool:
    return len(curves) == len(length.seeds)


def by_rate(found: Found[Trial, Point], name: str, length: Length = FULL) -> dict[float, Curves]:
    """A configuration's full trainings by initial rate, in the order of their seeds."""
    made: dict[float, Curves] = {}
    for trial in sorted(found, key=lambda trial: (trial.lr, trial.seed)):
        if trial.name == name and trial.epochs == length.epochs and trial.is_usual and not trial.is_tuning:
            made.setdefault(trial.lr, []).append(found[trial])
    return made


def accuracy(curves: Curves) -> Spread:
    """At the end."""
    return spread_of([final_accuracy(points) for points in curves])


def hours(curves: Curves) -> Spread:
    return spread_of([points[-1].seconds / 3600 for points in curves])


def common_target(*methods: Curves) -> float:
    """The best that the weakest of the methods has in its worst seed."""
    return min(max(point.measure for point in points) for curves in methods for points in curves)


def reaching(curves: Curves, target: float) -> list[Point] | None:
    """Where each seed first has an accuracy; None: some never have it."""
    reached = [first_reaching(points, target) for points in curves]
    there = [point for point in reached if point is not None]
    return there if len(there) == len(reached) else None


def times_as_soon(sooner: Curves, later: Curves) -> float:
    """Of two methods, at their common target."""
    target = common_target(sooner, later)
    seconds = [[point.seconds for point in reaching(curves, target) or []] for curves in (sooner, later)]
    return (sum(seconds[1]) / len(seconds[1])) / (sum(seconds[0]) / len(seconds[0]))


def updates_to(curves: Curves, target: float) -> float:
    """Mean over seeds; NaN: some never get there."""
    reached = reaching(curves, target)
    return math.nan if reached is None else sum(point.update for point in reached) / len(reached)


def exponent(updates: Sequence[float], workers: Sequence[int]) -> float:
    """Of updates over workers, between the first and the last of two."""
    return math.log(updates[1] / updates[0]) / math.log(workers[1] / workers[0])
