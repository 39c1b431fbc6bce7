"""Estimates of the time to a round's k-th arrival, from rounds that were mostly cut short.

A round that closed at its quorum has no times of later arrivals. So the mean time of the k-th arrival is built from
gaps. The gap before the k-th arrival is averaged over the rounds that waited for it, whether it came or not; a wait
that was given up counts as censored, longer than the time waited (Kaplan and Meier, 1958). Gaps are of whole rounds,
not of single workers, so workers that are slow together, or always, are no special case.

A round is a list: [places it waited for, seconds when it closed, seconds of the 1st, 2nd, … place]. Places are
1, 2, 3 … arrivals; with very many workers, only some of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import sub
from typing import NamedTuple

Round = list[float]
_WAITED, _CLOSED, _FIRST = 0, 1, 2  # indices in a round

#: Up to 48 workers every number of arrivals is a place. With more, the distance from all workers grows by 15 % a place.
_EVERY_PLACE, _GROWTH = 48, 0.15


def places_of(workers: int) -> list[int]:
    """The candidates for a quorum, as numbers of arrivals, smallest first."""
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
    return Gap(mean_wait(observed, censored), count, max(*censored, max(observed, default=0.0)))


def _still_waiting(observed: Sequence[float], censored: Sequence[float]) -> Iterator[tuple[float, float, float]]:
    """Steps of the Kaplan-Meier curve: (share still waiting, start, end). The last one ends at infinity."""
    ends = sorted([*((value, 0) for value in observed), *((value, 1) for value in censored)])
    share, last = 1.0, 0.0
    for at_risk, (value, is_censored) in zip(range(len(ends), 0, -1), ends, strict=True):
        yield share, last, value
        last = value
        if not is_censored:
            share *= 1 - 1 / at_risk
    yield share, last, math.inf


def mean_wait(observed: Sequence[float], censored: Sequence[float]) -> float:
    """The mean, where censored values are lower bounds: the area under the share that still waits.

    The share that still waits at the longest time seen is assumed to wait as long again. A shorter wait would be too
    optimistic under heavy tails; with a longer one, the place would never be tried.
    """
    area = 0.0
    for share, start, end in _still_waiting(observed, censored):
        area += share * (end - start if end < math.inf else start)
    return area


def means(found: Sequence[Gap | None], quorum: int) -> list[float | None]:
    """Mean seconds to each place, None from the first unknown gap on; pessimistic beyond the quorum's place.

    There, the mean includes one more wait, as long as the longest seen for this place or the next: few looks may have
    missed a rare long wait.
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
    """Seconds from the quorum's place to a later one, of rounds that waited for it: waits seen, and waits given up."""
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
    """Seconds to a place, of each round that reached it."""
    return [one[_FIRST + place - 1] for one in rounds if len(one) - _FIRST >= place]


def waits(rounds: Iterable[Round], quorum: int, place: int) -> list[float]:
    """Seconds from the quorum's place to a later one, of each round that waited for it; infinite if given up."""
    return [
        one[_FIRST + place - 1] - one[_FIRST + quorum - 1] if len(one) - _FIRST >= place else math.inf
        for one in rounds
        if one[_WAITED] >= place and len(one) - _FIRST >= quorum
    ]


#: A mean wait is clearly not worth it at this multiple of its worth.
_CLEARLY = 1.5


def patience(seen: list[float], given_up: list[float], worth_s: float) -> float:
    """Seconds to wait for a later place, to learn whether its mean wait is below `worth_s`.

    The wait lasts until it is clear that the place is not worth it: until the mean wait, cut off there, would be
    clearly above `worth_s`. The share that still waited at the longest time seen, or one further round if that is
    more, is assumed to wait until then.
    """
    clearly, area = _CLEARLY * worth_s, 0.0
    for share, start, end in _still_waiting(seen, given_up):
        if end == math.inf:
            share = max(share, 1 / (len(seen) + len(given_up) + 1))
        if area + share * (end - start) >= clearly:
            return start + (clearly - area) / share
        area += share * (end - start)
    raise AssertionError("the last share waits forever")


#: Probability of a false alarm in one test for a change.
_CHANCE = 1e-5
_SAME = 100  # bins per factor of e: times that differ by less than 1 % are equal


def has_slowed(times: Sequence[float], recent: int) -> bool:
    """Whether several recent times exceed all times before. By chance, one does so once in before + 1 times."""
    before = len(times) - recent
    if before < 2 * recent:
        return False
    top = 1.01 * max(times[:before])
    above = sum(value > top for value in times[before:])
    return above > 0 and math.comb(recent, above) * (before + 1.0) ** -above < _CHANCE


def has_changed(times: Sequence[float], recent: int) -> bool:
    """Whether recent times have another distribution than the times before (Kolmogorov and Smirnov), of any law."""
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
