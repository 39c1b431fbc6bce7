"""Guesses what was not seen: work that was cancelled, and rounds that a worker took no part in.

A ticket that was cancelled after c seconds needed longer than c. How much longer is drawn from the times that were
seen to be longer, by Kaplan and Meier's weights, over all workers of the same stretch of rounds, each beside its own
usual time; beyond everything seen, from an exponential tail.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quorate.planning.world import Floats

Bools = NDArray[np.bool_]

_ENOUGH = 10  # finished tickets of a worker, to say anything of it
_LEVEL = 0.3  # workers are compared by the time that this share of their tickets needs: rarely cancelled so early
_TAIL_FROM = 0.8  # the tail's mean is taken from the times beyond this share


def fill_in(
    seconds: Floats, observed: Bools, regimes: tuple[slice, ...], random: np.random.Generator
) -> tuple[Floats, list[int]]:
    """A whole table: what ended early gets a longer time, what is missing one of the worker's own.

    Gives the columns, too, of workers that hardly ever finished: how slow they are is not known, and the table has
    them come last, with the last of the others: a lower bound.
    """
    grain = 1e-9 * float(np.nanmedian(seconds))  # times are differences of clocks: equal ones differ in the last digits
    seconds, observed = np.maximum(np.round(seconds / grain), 1.0) * grain, observed.copy()
    for regime in regimes:
        observed[regime] |= _stays(seconds[regime], observed[regime], random)
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
    """The rounds of one stretch, with a guess in place of each time that was cut short."""
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


def _stays(seconds: Floats, observed: Bools, random: np.random.Generator) -> Bools:
    """Which times that were cut short were at their end anyway, where many take exactly the same time.

    When several arrive at the same instant as the one that fills the quorum, those cancelled then may have been as
    quick. How many were not follows from how often a round closes later: with n workers and b too many for the quorum,
    that is when more than b of the n are slow.
    """
    open_ended = ~np.isnan(seconds) & ~observed
    if not open_ended.any():
        return np.zeros_like(observed)
    last = np.nanmax(np.where(observed, seconds, np.nan), axis=1, initial=0.0)
    equal = observed & (np.abs(seconds - last[:, None]) <= 1e-9 * last[:, None])
    rows = (equal.sum(axis=1) > 1) & open_ended.any(axis=1)
    if not rows.any():
        return np.zeros_like(open_ended)
    at = float(np.median(last[rows]))
    same = rows & (np.abs(last - at) <= 1e-9 * at)
    later = int((open_ended.any(axis=1) & (last > at * (1 + 1e-9))).sum())
    backups = round(float(open_ended[same].sum(axis=1).mean()))
    chances = _slow_counts(seconds.shape[1], backups, (later + 0.5) / (later + int(same.sum()) + 0.5))
    slow = random.choice(backups + 1, len(seconds), p=chances)
    # Whichever of those cancelled come first in a random order are the slow ones.
    rank = np.argsort(np.argsort(np.where(open_ended, random.random(open_ended.shape), 2.0), axis=1), axis=1)
    return np.asarray(open_ended & same[:, None] & (rank >= slow[:, None]), dtype=np.bool_)


def _slow_counts(workers: int, backups: int, closes_later: float) -> Floats:
    """How many of those cancelled were slow: P(K = k | K <= b) for K ~ Bin(n, p) with P(K > b) = closes_later."""
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
    """A worker's usual time; nan if it finished too little to say."""
    if observed.sum() < _ENOUGH:
        return math.nan
    return _Survival(seconds, observed).quantile(_LEVEL)


class _Survival:
    """Kaplan and Meier's estimate, with an exponential tail beyond the last time seen."""

    def __init__(self, seconds: Floats, observed: Bools) -> None:
        order = np.lexsort((~observed, seconds))  # at equal times the finished first: the others outlived them
        times, ends = seconds[order], observed[order]
        at_risk = np.arange(len(times), 0, -1)
        share = np.cumprod(np.where(ends, 1.0 - 1.0 / at_risk, 1.0))
        self._times, self._share = times[ends], share[ends]
        from_s = self.quantile(_TAIL_FROM)
        beyond = np.maximum(seconds - from_s, 0.0)
        self._tail_s = float(beyond.sum() / max(1, int((observed & (seconds > from_s)).sum())))
        if len(self._times) > 1 and np.isclose(self._times[-2], self._times[-1], rtol=1e-8):
            self._tail_s = 0.0  # the longest time came twice exactly: it is the longest there is

    def quantile(self, level: float) -> float:
        place = int(np.searchsorted(-self._share, -(1.0 - level)))
        return float(self._times[min(place, len(self._times) - 1)])

    def beyond(self, least: Floats, u: Floats) -> Floats:
        """A time longer than each of `least`, at level u of what remains."""
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
    """A round without this worker gets one of its times from the same stretch, or else from any."""
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
