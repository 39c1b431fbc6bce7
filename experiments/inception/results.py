"""What the trainings came to: by configuration at its chosen rate, by split of the grid, and how soon an accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from experiments.common.curves import Point, first_reaching
from experiments.common.spread import Spread, spread_of
from experiments.common.trials import Found
from experiments.inception.settings import (
    CLIPPED_WORKERS,
    FULL,
    GRID_RATE,
    QUICK,
    Length,
    Trial,
    configurations,
    final_accuracy,
    tuning_of,
)
from experiments.inception.timing import Seconds, Split

Curves = list[list[Point]]


def length_of(found: Found[Trial, Point]) -> Length:
    """Quick trials are never in one table with others."""
    return FULL if any(trial.epochs == FULL.epochs for trial in found) else QUICK


def finals(found: Found[Trial, Point], length: Length = FULL) -> dict[str, Curves]:
    """Every seed of each configuration, at its chosen rate."""
    return {name: by_rate(found, name, length)[rate] for name, rate in rates(found, length).items()}


def rates(found: Found[Trial, Point], length: Length = FULL) -> dict[str, float]:
    """By configuration: sync has the tuned rate, async that with the best mean test accuracy of those in full."""
    made: dict[str, float] = {}
    for one in configurations():
        all_rates = by_rate(found, one.name, length)
        there = {rate: curves for rate, curves in all_rates.items() if len(curves) == len(length.seeds)}
        best = tuned_rate(found, one.name, length)
        if one.method == "async" and there:
            made[one.name] = max(there, key=lambda rate: accuracy(there[rate]).mean)
        elif best in there:
            made[one.name] = best
    return made


def by_rate(found: Found[Trial, Point], name: str, length: Length = FULL) -> dict[float, Curves]:
    """A configuration's full trainings by initial rate, in the order of their seeds."""
    made: dict[float, Curves] = {}
    for trial in _sorted(found):
        if trial.name == name and trial.epochs == length.epochs and trial.is_usual and not trial.is_tuning:
            made.setdefault(trial.lr, []).append(found[trial])
    return made


def _sorted(found: Found[Trial, Point]) -> list[Trial]:
    return sorted(found, key=lambda trial: (trial.lr, trial.clip, trial.seed))


def early(found: Found[Trial, Point], quorum: int, average: float) -> dict[float, Curves]:
    """The first epochs of a quorum's trainings by initial rate."""
    made: dict[float, Curves] = {}
    for trial in _sorted(found):
        if trial.stop and (trial.quorum, trial.average) == (quorum, average):
            made.setdefault(trial.lr, []).append(found[trial])
    return made


def long(found: Found[Trial, Point], name: str, length: Length = FULL) -> Curves:
    """A configuration's trainings of twice the epochs."""
    return [found[trial] for trial in _sorted(found) if trial.name == name and trial.epochs == length.long_epochs]


def tuned_rate(found: Found[Trial, Point], name: str, length: Length = FULL) -> float | None:
    """What the tuning chose; None: it is not over."""
    (one,) = (one for one in configurations() if one.name == name)
    best = tuning_of(one, found, length)[1]
    return None if best is None else best.lr


def tuning_curves(found: Found[Trial, Point], name: str) -> dict[float, list[Point]]:
    """A configuration's tuning by rate."""
    tried = [trial for trial in _sorted(found) if trial.is_tuning and trial.name == name]
    return {trial.lr: found[trial] for trial in tried}


def clipped(found: Found[Trial, Point], length: Length = FULL) -> dict[float, Curves]:
    """Async trainings by the norm that gradients are clipped to, at one rate."""
    name = f"async {CLIPPED_WORKERS}"
    others = [trial for trial in _sorted(found) if trial.name == name and not trial.is_usual]
    made: dict[float, Curves] = {}
    for trial in _sorted(found):
        if others and trial.name == name and not trial.is_tuning and trial.lr == others[0].lr:
            made.setdefault(trial.clip, []).append(found[trial])
    return made


def accuracy(curves: Curves) -> Spread:
    """At the end."""
    return spread_of([final_accuracy(points) for points in curves])


def more(one: Curves, other: Curves) -> Spread:
    """By how much one ends above the other, seed by seed."""
    return spread_of([final_accuracy(mine) - final_accuracy(yours) for mine, yours in zip(one, other, strict=True)])


def hours(curves: Curves) -> Spread:
    return spread_of([points[-1].seconds / 3600 for points in curves])


def ends(curves: Curves) -> Spread:
    """What was measured last, of trainings that may have been stopped before."""
    return spread_of([points[-1].measure for points in curves])


def seconds_of_training(curves: Curves, gradients: int = 1) -> Spread:
    """Seconds of so many updates, on average over a training."""
    return spread_of([gradients * points[-1].seconds / points[-1].update for points in curves])


def common_target(*methods: Curves) -> float:
    """The best that the weakest of the methods has in its worst seed."""
    return min(max(_measures(points)) for curves in methods for points in curves)


def _measures(points: list[Point]) -> list[float]:
    return [point.measure for point in points if not math.isnan(point.measure)] or [0.0]


def reaching(curves: Curves, target: float) -> list[Point] | None:
    """Where each seed first has an accuracy; None: some never have it, or there is no seed."""
    reached = [first_reaching(points, target) for points in curves]
    there = [point for point in reached if point is not None]
    return there if there and len(there) == len(reached) else None


def hours_to(curves: Curves, target: float) -> Spread | None:
    """None: some seeds never get there."""
    reached = reaching(curves, target)
    return None if reached is None else spread_of([point.seconds / 3600 for point in reached])


def times_as_soon(sooner: Curves, later: Curves) -> float:
    """Of two methods, at their common target."""
    target = common_target(sooner, later)
    seconds = [[point.seconds for point in reaching(curves, target) or []] for curves in (sooner, later)]
    return fmean(seconds[1]) / fmean(seconds[0])


def updates_to(curves: Curves, target: float) -> float:
    """Mean over seeds; NaN: some never get there."""
    reached = reaching(curves, target)
    return math.nan if reached is None else fmean(point.update for point in reached)


# ---------------------------------------------------------------- the grid


def split(found: Found[Trial, Point], quorum: int, backups: int, length: Length = FULL) -> Curves:
    """A split's trainings at the rate of the grid; none unless every seed is there."""
    curves = by_rate(found, f"sync {quorum}+{backups}", length).get(GRID_RATE, [])
    return curves if len(curves) == len(length.seeds) else []


def exponent(updates: Sequence[float], workers: Sequence[int]) -> float:
    """Of updates over workers: the slope of a straight line through their logarithms, by least squares."""
    x, y = ([math.log(one) for one in some] for some in (workers, updates))
    around = fmean(x), fmean(y)
    products = [(one - around[0]) * (other - around[1]) for one, other in zip(x, y, strict=True)]
    return sum(products) / sum((one - around[0]) ** 2 for one in x)


def grid_exponent(found: Found[Trial, Point], backups: int, target: float, length: Length = FULL) -> Spread | None:
    """Of updates to an accuracy over the grid's quorums, fitted seed by seed; None: not all splits have it."""
    return exponent_of({quorum: split(found, quorum, backups, length) for quorum in length.grid}, target)


def exponent_of(by_quorum: dict[int, Curves], target: float) -> Spread | None:
    """Of updates to an accuracy over quorums, fitted seed by seed; None: not all seeds have it."""
    reached = [reaching(curves, target) for curves in by_quorum.values()]
    there = [points for points in reached if points is not None]
    if len(there) < len(by_quorum):
        return None
    return spread_of([exponent([one.update for one in seed], list(by_quorum)) for seed in zip(*there, strict=True)])


def seconds_a_round(rounds: Found[Split, Seconds], quorum: int, backups: int) -> Spread | None:
    """Mean over seeds; None: not timed."""
    seconds = [row.seconds for one, (row,) in rounds.items() if (one.quorum, one.backups) == (quorum, backups)]
    return spread_of(seconds) if seconds else None
