"""Estimates of unseen times (cancelled tickets, rounds without a worker), and the stretches they are drawn from.

A ticket cancelled after c seconds would have taken longer than c. Its time is drawn from the longer times of all
workers in the same stretch of rounds, relative to each worker's usual time, with Kaplan-Meier weights. Beyond the
longest observed time, an exponential tail is used.

A stretch is a sequence of rounds of one level, such as a slow spell. A spell lasts for seconds, not for rounds: a split
with faster updates makes more of them during the spell. Stretches are therefore weighted by time, and rounds within a
stretch by count. If every slow round were a stretch of its own, chance would be mistaken for a spell.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quorate.planning.world import Floats

Bools = NDArray[np.bool_]

_ENOUGH = 10  # finished tickets of a worker; fewer allow no estimate
_LEVEL = 0.3  # quantile that is a worker's usual time: tickets are rarely cancelled that early
_TAIL_FROM = 0.8  # quantile from which on times determine the mean of the exponential tail


def fill_in(
    seconds: Floats, observed: Bools, regimes: tuple[slice, ...], random: np.random.Generator
) -> tuple[Floats, list[int]]:
    """A complete table: cancelled tickets get a longer time, missing ones another time of the same worker.

    Also returns the columns of workers that hardly ever finished. Their times are unknown, so they get the longest
    time of the other workers as a lower bound.
    """
    grain = 1e-9 * float(np.nanmedian(seconds))  # clock differences: equal times differ in the last digits
    seconds, observed = np.maximum(np.round(seconds / grain), 1.0) * grain, observed.copy()
    for regime in regimes:
        observed[regime] |= _finished_anyway(seconds[regime], observed[regime], random)
    filled = seconds.copy()
    cut_short = ~np.isnan(seconds) & ~observed
    finished = observed.sum(axis=0)
    unknown = [
        column
        for column in range(seconds.shape[1])
        if cut_short[:, column].any() and finished[column] < max(_ENOUGH, 0.02 * len(seconds))
    ]
    known = [column for column in range(seconds.shape[1]) if column not in unknown]
    if cut_short.any() and known:
        for regime in regimes:
            here = filled[regime][:, known]
            filled[regime, known] = _lengthened(here, observed[regime][:, known], random)
    for column in known:
        _fill_gaps(filled, column, regimes, random)
    if unknown and known:
        filled[:, unknown] = filled[:, known].max(axis=1, keepdims=True)
    return filled, unknown


def _lengthened(seconds: Floats, observed: Bools, random: np.random.Generator) -> Floats:
    """The rounds of one stretch, with an estimate in place of each cancelled time."""
    there = ~np.isnan(seconds)
    open_ended = there & ~observed
    if not open_ended.any() or not observed.any():
        return seconds
    usual = np.array([_usual(seconds[there[:, c], c], observed[there[:, c], c]) for c in range(seconds.shape[1])])
    usual = np.where(np.isnan(usual), np.nanmedian(usual) if not np.isnan(usual).all() else 1.0, usual)
    relative = seconds / usual
    curve = _Survival(relative[there], observed[there])
    result = relative.copy()
    result[open_ended] = curve.beyond(relative[open_ended], random.random(int(open_ended.sum())))
    return np.asarray(result * usual, dtype=np.float64)


def _finished_anyway(seconds: Floats, observed: Bools, random: np.random.Generator) -> Bools:
    """Cancelled tickets that were about to finish, in worlds where many tickets take exactly the same time.

    If several gradients arrive at the instant that fills the quorum, the tickets cancelled then may have been equally
    fast. The number of slow ones follows from how often a round closes later: with n workers and b backups, a round
    closes later if more than b of the n are slow.
    """
    open_ended = ~np.isnan(seconds) & ~observed
    if not open_ended.any():
        return np.zeros_like(observed)
    last = np.nanmax(np.where(observed, seconds, np.nan), axis=1, initial=0.0)
    equal = observed & (np.abs(seconds - last[:, None]) <= 1e-9 * last[:, None])
    rows = (equal.sum(axis=1) > 1) & open_ended.any(axis=1)
    if not rows.any():
        return np.zeros_like(open_ended)
    at = float(np.quantile(last[rows], 0.5, method="lower"))  # of one of these rounds, not between two
    same = rows & (np.abs(last - at) <= 1e-9 * at)
    later = int((open_ended.any(axis=1) & (last > at * (1 + 1e-9))).sum())
    backups = round(float(open_ended[same].sum(axis=1).mean()))
    chances = _slow_counts(seconds.shape[1], backups, (later + 0.5) / (later + int(same.sum()) + 0.5))
    slow = random.choice(backups + 1, len(seconds), p=chances)
    # The first `slow` of the cancelled tickets in a random order are the slow ones.
    rank = np.argsort(np.argsort(np.where(open_ended, random.random(open_ended.shape), 2.0), axis=1), axis=1)
    return np.asarray(open_ended & same[:, None] & (rank >= slow[:, None]), dtype=np.bool_)


def _slow_counts(workers: int, backups: int, closes_later: float) -> Floats:
    """Number of slow cancelled tickets: P(K = k | K <= b) for K ~ Bin(n, p) with P(K > b) = closes_later."""
    counts = np.arange(workers + 1)
    ln_ways = [math.lgamma(workers + 1) - math.lgamma(k + 1) - math.lgamma(workers - k + 1) for k in range(workers + 1)]
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        chances = np.exp(ln_ways + counts * math.log(p) + (workers - counts) * math.log1p(-p))
        if chances[backups + 1 :].sum() < closes_later:
            low = p
        else:
            high = p
    few = chances[: backups + 1]
    return np.asarray(few / few.sum(), dtype=np.float64)


def _usual(seconds: Floats, observed: Bools) -> float:
    """A worker's usual time; nan if it finished too few tickets."""
    return _Survival(seconds, observed).quantile(_LEVEL) if observed.sum() >= _ENOUGH else math.nan


class _Survival:
    """Kaplan-Meier estimate, with an exponential tail beyond the longest observed time."""

    def __init__(self, seconds: Floats, observed: Bools) -> None:
        order = np.lexsort((~observed, seconds))  # of equal times the finished first: cancelled tickets lasted longer
        times, ends = seconds[order], observed[order]
        at_risk = np.arange(len(times), 0, -1)
        share = np.cumprod(np.where(ends, 1.0 - 1.0 / at_risk, 1.0))
        self._times, self._share = times[ends], share[ends]
        from_s = self.quantile(_TAIL_FROM)
        beyond = np.maximum(seconds - from_s, 0.0)
        self._tail_s = float(beyond.sum() / max(1, int((observed & (seconds > from_s)).sum())))
        if len(self._times) > 1 and np.isclose(self._times[-2], self._times[-1], rtol=1e-8):
            self._tail_s = 0.0  # the longest time occurs twice: it is the maximum

    def quantile(self, level: float) -> float:
        place = int(np.searchsorted(-self._share, -(1.0 - level)))
        return float(self._times[min(place, len(self._times) - 1)])

    def beyond(self, least: Floats, u: Floats) -> Floats:
        """For each of `least` a longer time: the quantile u of the times beyond it."""
        before = np.searchsorted(self._times, least, side="right")
        alive = np.where(before > 0, self._share[np.maximum(before - 1, 0)], 1.0)
        target = alive * (1.0 - u)
        place = np.searchsorted(-self._share, -target)
        inside = place < len(self._times)
        seen = self._times[np.minimum(place, len(self._times) - 1)]
        leftover = max(float(self._share[-1]), 1e-12)
        start = np.maximum(self._times[-1], least)
        tail = start - self._tail_s * np.log(np.clip(target / np.minimum(leftover, alive), 1e-12, 1.0))
        return np.asarray(np.maximum(np.where(inside, seen, tail), least), dtype=np.float64)


def _fill_gaps(filled: Floats, column: int, regimes: tuple[slice, ...], random: np.random.Generator) -> None:
    """Give rounds without this worker one of its times from the same stretch, else from any stretch."""
    times = filled[:, column]
    everywhere = times[~np.isnan(times)]
    if len(everywhere) == len(times):
        return
    if not len(everywhere):
        everywhere = filled[~np.isnan(filled)]
    for regime in regimes:
        here = times[regime]
        missing = np.isnan(here)
        seen = here[~missing]
        here[missing] = random.choice(seen if len(seen) >= _ENOUGH else everywhere, int(missing.sum()))


_SHORTEST = 8  # rounds; in fewer, a level cannot be told from chance
_PENALTY = 5.0  # × variance × ln(rounds): the reduction of squared error that justifies a cut
_LONGEST_SERIES = 20_000


def find_regimes(seconds: Floats) -> tuple[slice, ...]:
    """Cut rounds into stretches of one level each: optimal partitioning of the mean log time of rounds."""
    level = np.nanmean(np.log(seconds / np.nanmedian(seconds, axis=0)), axis=1)
    rounds = len(level)
    if rounds < 2 * _SHORTEST:
        return (slice(0, rounds),)
    step = math.ceil(rounds / _LONGEST_SERIES)
    cuts = [cut * step for cut in _cuts(level[: rounds // step * step].reshape(-1, step).mean(axis=1))]
    edges = [0, *cuts, rounds]
    return tuple(slice(low, high) for low, high in pairwise(edges))


def _cuts(level: Floats) -> list[int]:
    """The cuts that minimise squared error plus a penalty per cut (PELT of Killick et al., inner loop in numpy)."""
    rounds = len(level)
    # The variance comes from differences of neighbours, since a change of level affects only one of them.
    noise = float(np.mean(np.diff(level) ** 2)) / 2.0 or 1e-12
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
        candidates = candidates[total - penalty <= best[end]]  # the other candidates can never be optimal again
    cuts: list[int] = []
    end = int(before[rounds])
    while end > 0:
        cuts.append(end)
        end = int(before[end])
    return cuts[::-1]
