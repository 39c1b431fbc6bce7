"""Learning rates, tuned for every method on the same budget: a grid in factors of two, moved while its edge is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Trial = TypeVar("Trial")


def tuned(
    first: Sequence[float], make: Callable[[float], Trial], score: Callable[[Trial], float | None], most: int
) -> tuple[list[Trial], Trial | None]:
    """The trials that choose a rate, and the best of them once all are there.

    first: the grid to begin with, the same number of rates for every method.
    make: the trial of a rate. score: how good a trial was, more is better, NaN is worst; None: it has not been run.
    most: rates to try at most: while the best is at an edge, one more beyond it is wanted.
    """
    rates = sorted(first)
    while True:
        trials = [make(rate) for rate in rates]
        scores = [-math.inf if one is not None and math.isnan(one) else one for one in map(score, trials)]
        known = [one for one in scores if one is not None]
        if len(known) < len(scores):
            return trials, None
        best = max(range(len(rates)), key=known.__getitem__)
        if len(rates) >= most or 0 < best < len(rates) - 1:
            return trials, trials[best]
        rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]
