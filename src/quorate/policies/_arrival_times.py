"""How long a round takes to its k-th arrival, learned from rounds that were mostly cut short.

A round that closed at its quorum says nothing of the arrivals beyond it. So the mean time of the k-th arrival is built
from gaps: the gap before the k-th is averaged over the rounds that waited for it, whatever their outcome, and
a wait that was given up enters as what it is, longer than the time waited (Kaplan and Meier, 1958). Arrivals are taken
together as they came, so workers that are slow together, or always, are no special case.

A round is a list: [places it waited for, seconds when it closed, seconds of the 1st, 2nd, … place]. Places are
1, 2, 3 … arrivals, or some of these numbers where there are very many workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import sub
from typing import NamedTuple

Round = list[float]
_WAITED, _CLOSED, _FIRST = 0, 1, 2  # what is where in a round

#: Up to so many workers every number of arrivals is a place; beyond, distances from the top grow by a fraction.
_EVERY_PLACE, _GROWTH = 48, 0.15


def places_of(workers: int) -> list[int]:
    """The numbers of arrivals that are considered as a quorum, smallest first."""
    if workers <= _EVERY_PLACE:
        return list(range(1, workers + 1))
    left_out: list[int] = []
    distance = 0
    while distance < workers:
        left_out.append(distance)
        distance = max(distance + 1, math.ceil(distance * (1 + _GROWTH)))
    return sorted({1, *(workers - one for one in left_out)})


class Gap(NamedTuple):
    """The seconds between two places."""

    mean: float
    rounds: int  # that waited for it
    longest: float


def gaps(rounds: Iterable[Round], places: int) -> list[Gap | None]:
    """The gap before each place, None where no round has waited for it."""
    groups: dict[int, list[Round]] = {}
    for one in rounds:
        groups.setdefault(len(one) - _FIRST, []).append(one)
    seen: list[list[float]] = [[] for _ in range(places)]
    given_up: list[list[float]] = [[] for _ in range(places)]
    for reached, alike in groups.items():
        columns = list(zip(*alike, strict=True))[_FIRST:]
        if columns:
            seen[0].extend(columns[0])
        for place, (before, after) in enumerate(pairwise(columns), start=1):
            seen[place].extend(map(sub, after, before))
        for one in alike:
            if one[_WAITED] > reached:
                given_up[reached].append(one[_CLOSED] - (one[-1] if reached else 0.0))
    return [_gap(observed, censored) for observed, censored in zip(seen, given_up, strict=True)]


def _gap(observed: list[float], censored: list[float]) -> Gap | None:
    count = len(observed) + len(censored)
    if not count:
        return None
    if not censored:
        return Gap(sum(observed) / count, count, max(observed))
    return Gap(restricted_mean(observed, censored, math.inf), count, max(max(censored), max(observed, default=0.0)))


def restricted_mean(observed: Iterable[float], censored: Iterable[float], horizon: float) -> float:
    """The mean of min(value, horizon), by Kaplan and Meier: the area under the share that is still waiting.

    What is still waiting at the longest time seen is taken to wait as long again: less would be too hopeful under
    heavy tails, and more would never be tried.
    """
    ends = sorted([*((value, 0) for value in observed), *((value, 1) for value in censored)])
    at_risk, share, area, last = len(ends), 1.0, 0.0, 0.0
    for value, is_censored in ends:
        if value >= horizon:
            return area + share * (horizon - last)
        area += share * (value - last)
        last = value
        if not is_censored:
            share *= 1 - 1 / at_risk
        at_risk -= 1
    return area + share * min(last, horizon - last)


def means(found: Sequence[Gap | None], quorum: int) -> list[float | None]:
    """Mean seconds to each place, as far up as is known; with care beyond the quorum's place.

    There, one more of the longest wait seen is added to what was seen, be it for this place or the next one: few
    looks may have missed a rare long wait.
    """
    times: list[float | None] = []
    total: float | None = 0.0
    for place, gap in enumerate(found, start=1):
        if gap is None or total is None:
            total = None
        else:
            total += gap.mean
            if place > quorum:
                following = found[place] if place < len(found) else None
                longest = gap.longest if following is None else max(gap.longest, following.longest)
                total += longest / (gap.rounds + 1)
        times.append(total)
    return times


def excess(rounds: Iterable[Round], quorum: int, place: int) -> tuple[list[float], list[float]]:
    """Seconds from the quorum's place to a later one: those seen, and those given up, of rounds that waited for it."""
    seen, given_up = [], []
    for one in rounds:
        reached = len(one) - _FIRST
        if one[_WAITED] >= place and reached >= quorum:
            start = one[_FIRST + quorum - 1]
            if reached >= place:
                seen.append(one[_FIRST + place - 1] - start)
            else:
                given_up.append(one[_CLOSED] - start)
    return seen, given_up


def times_of(rounds: Iterable[Round], place: int) -> list[float]:
    """Seconds to a place, round by round, where it was reached."""
    return [one[_FIRST + place - 1] for one in rounds if len(one) - _FIRST >= place]


def waits(rounds: Iterable[Round], quorum: int, place: int) -> list[float]:
    """Seconds from the quorum's place to a later one, of each round that waited for it; endless if given up."""
    return [
        one[_FIRST + place - 1] - one[_FIRST + quorum - 1] if len(one) - _FIRST >= place else math.inf
        for one in rounds
        if one[_WAITED] >= place and len(one) - _FIRST >= quorum
    ]


#: How far above its worth a mean wait must be seen to be.
_CLEARLY = 1.5


def patience(seen: list[float], given_up: list[float], worth_s: float) -> float:
    """How long to wait for a later place that would be worth so many seconds on average, to learn if it is.

    As long as it takes to see that it is not: until the mean wait, cut off there, is clearly above its worth, if the
    share that still waited at the longest time seen (or one more round would) waits until then.
    """
    clearly = _CLEARLY * worth_s
    ends = sorted([*((value, 0) for value in seen), *((value, 1) for value in given_up)])
    at_risk, share, area, last = len(ends), 1.0, 0.0, 0.0
    for value, is_censored in ends:
        if area + share * (value - last) >= clearly:
            return last + (clearly - area) / share
        area += share * (value - last)
        last = value
        if not is_censored:
            share *= 1 - 1 / at_risk
        at_risk -= 1
    return last + (clearly - area) / max(share, 1 / (len(ends) + 1))


#: How often a change may be seen where there is none, each time one looks.
_CHANCE = 1e-5
_SAME = 100  # to the power of e: times that differ by less than 1 % are equal


def has_slowed(times: Sequence[float], recent: int) -> bool:
    """Whether several of the recent times are above all before: by chance, each is so once in before + 1 times."""
    before = len(times) - recent
    if before < 2 * recent:
        return False
    top = 1.01 * max(times[:before])
    above = sum(value > top for value in times[before:])
    return above > 0 and math.comb(recent, above) * (before + 1.0) ** -above < _CHANCE


def has_changed(times: Sequence[float], recent: int) -> bool:
    """Whether the recent times are spread otherwise than those before (Kolmogorov and Smirnov), whatever their law."""
    before = len(times) - recent
    if before < 2 * recent:
        return False
    binned = [math.inf if value == math.inf else round(_SAME * math.log(max(value, 1e-9))) for value in times]
    distance = _largest_distance(sorted(binned[:before]), sorted(binned[before:]))
    return 2 * math.exp(-2 * distance**2 * before * recent / (before + recent)) < _CHANCE


def _largest_distance(one: Sequence[float], other: Sequence[float]) -> float:
    largest, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        value = min(one[i], other[j])
        while i < len(one) and one[i] == value:
            i += 1
        while j < len(other) and other[j] == value:
            j += 1
        largest = max(largest, abs(i / len(one) - j / len(other)))
    return largest
