"""Means by formula, and laws that have none."""

from __future__ import annotations

import math

import numpy as np

from quorate.errors import BadInput
from quorate.latency import Latency, Pareto, order_statistic_mean
from quorate.latency.laws import ShiftedExponential
from quorate.planning.world import Floats

_MOST_INTEGRALS = 200  # splits whose mean is integrated; with more machines, drawn rounds are as good


def exact_means(latency: Latency, machines: int) -> Floats | None:
    """E[X_(N:n)] for N = 1 … n, inf where there is no mean; None where no formula holds."""
    if machines > _MOST_INTEGRALS and not isinstance(latency, Pareto | ShiftedExponential):
        return None
    try:
        return np.array([order_statistic_mean(latency, machines, quorum) for quorum in range(1, machines + 1)])
    except BadInput:
        return None


def finite_from(latency: Latency) -> int | None:
    """The fewest backups with which an update has a mean; None where it always has one.

    The N-th of n times with a Pareto tail has a mean iff α > 1/(b+1).
    """
    tails = [law.alpha for law in _inside(latency) if isinstance(law, Pareto) and law.alpha <= 1.0]
    return math.floor(1.0 / min(tails)) if tails else None


def _inside(latency: Latency) -> list[Latency]:
    """The model and those that it is made of."""
    found = [latency]
    for value in vars(latency).values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, Latency):
                found += _inside(part)
    return found
