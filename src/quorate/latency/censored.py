"""What a time may have been that is only known to be longer than something."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from quorate.latency.durations import Duration


class Beyond:
    """Draws a time beyond a censored one, by the Kaplan-Meier weights of the observed times.

    Each censored time hands its weight to all that are longer (Efron 1967); this gives exactly the
    product-limit estimate, and conditioning it on "longer than c" is the draw.
    """

    def __init__(self, durations: Iterable[Duration]) -> None:
        # At equal times the observed come first: a ticket cancelled at t outlived those that ended at t.
        pool = sorted(durations, key=lambda duration: (duration[0], not duration[1]))
        share = 1.0
        weights: list[float] = []
        self._observed: list[float] = []
        for i, (seconds, observed) in enumerate(pool):
            if observed:
                weights.append(share / (len(pool) - i))
                self._observed.append(seconds)
                share -= weights[-1]
        self._up_to = list(accumulate(weights, initial=0.0))

    def draw(self, longer_than_s: float, u: float) -> float:
        first = bisect_right(self._observed, longer_than_s)
        if first == len(self._observed):
            return longer_than_s
        done, end = self._up_to[first], self._up_to[-1]
        i = bisect_right(self._up_to, done + u * (end - done), lo=first + 1)
        return self._observed[min(i - 1, len(self._observed) - 1)]
