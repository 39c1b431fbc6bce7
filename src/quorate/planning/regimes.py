"""Slow spells: where a series of rounds changes its level, and stays there for a while.

Rounds inside a stretch are taken as alike. It matters because a spell lasts for seconds, not for rounds: a split that
makes its updates faster makes more of them during the spell, so stretches are weighted by time, rounds within one
by count. Were every slow round a stretch of its own, chance would be taken for a spell.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from quorate.planning.world import Floats

_SHORTEST = 8  # rounds; fewer tell no level apart from chance
_PENALTY = 5.0  # times the variance times ln(rounds): how much better a cut must fit
_LONGEST_SERIES = 20_000


def find_regimes(seconds: Floats) -> tuple[slice, ...]:
    """Cut rounds into stretches of one level each (optimal partitioning of the round's mean log time)."""
    level = np.nanmean(np.log(seconds / np.nanmedian(seconds, axis=0)), axis=1)
    rounds = len(level)
    if rounds < 2 * _SHORTEST:
        return (slice(0, rounds),)
    step = math.ceil(rounds / _LONGEST_SERIES)
    cuts = [cut * step for cut in _cuts(level[: rounds // step * step].reshape(-1, step).mean(axis=1))]
    edges = [0, *cuts, rounds]
    return tuple(slice(low, high) for low, high in pairwise(edges))


def _cuts(level: Floats) -> list[int]:
    """Where to cut so that squared error plus a penalty a cut is least (Killick's PELT, inner loop in numpy)."""
    rounds = len(level)
    # From differences, which a change of level touches once. Ordered ones cut short the leverage of a few large jumps.
    noise = float(np.mean(np.diff(level) ** 2)) / 2.0
    if noise <= 0.0:
        noise = 1e-12
    penalty = _PENALTY * noise * math.log(rounds)
    sums = np.concatenate([[0.0], np.cumsum(level)])
    squares = np.concatenate([[0.0], np.cumsum(level**2)])
    best = np.full(rounds + 1, math.inf)
    best[0] = -penalty
    before = np.zeros(rounds + 1, dtype=np.int64)
    candidates = np.array([0])
    for end in range(_SHORTEST, rounds + 1):
        newest = end - _SHORTEST
        if newest >= _SHORTEST:
            candidates = np.append(candidates, newest)
        length = end - candidates
        error = squares[end] - squares[candidates] - (sums[end] - sums[candidates]) ** 2 / length
        total = best[candidates] + error + penalty
        place = int(np.argmin(total))
        best[end], before[end] = total[place], candidates[place]
        candidates = candidates[total - penalty <= best[end]]  # the others can never win again
    cuts: list[int] = []
    end = int(before[rounds])
    while end > 0:
        cuts.append(end)
        end = int(before[end])
    return cuts[::-1]
