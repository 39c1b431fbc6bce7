"""Distributions of ticket durations and of arrival times within rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quorate.reporting.rounds import KthMeans

_SHORTEST_S = 1e-9  # shorter durations count as this one


class Durations:
    """Histogram of durations in bins of equal ratio. A cancelled ticket counts as a lower bound (Kaplan-Meier).

    Otherwise a worker whose slow tickets are all cancelled would look fast.
    """

    def __init__(self, bins_per_e: int = 200) -> None:
        self.count = 0
        self.total_s = 0.0
        self._per_e = bins_per_e
        self._ended: dict[int, int] = {}
        self._cut: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        key = self._bin(seconds)
        self._ended[key] = self._ended.get(key, 0) + 1

    def add_cut(self, seconds: float) -> None:
        key = self._bin(seconds)
        self._cut[key] = self._cut.get(key, 0) + 1

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count else None

    @property
    def longest_s(self) -> float | None:
        """The longest duration, cancelled tickets included."""
        keys = (*self._ended, *self._cut)
        return self._middle(max(keys)) if keys else None

    def quantiles(self, levels: Sequence[float]) -> list[float | None]:
        """Quantiles at ascending levels; None where too many tickets were cancelled."""
        found: list[float | None] = []
        at_risk, left = self.count + sum(self._cut.values()), 1.0
        for key in sorted(self._ended.keys() | self._cut.keys()):
            ended = self._ended.get(key, 0)
            if ended:
                left *= 1 - ended / at_risk
                while len(found) < len(levels) and left <= 1 - levels[len(found)] + 1e-12:
                    found.append(self._middle(key))
            at_risk -= ended + self._cut.get(key, 0)
        return found + [None] * (len(levels) - len(found))

    def _bin(self, seconds: float) -> int:
        return math.floor(math.log(max(seconds, _SHORTEST_S)) * self._per_e)

    def _middle(self, key: int) -> float:
        return math.exp((key + 0.5) / self._per_e)


_LEVELS = [0.001, *(step / 100 for step in range(1, 100)), 0.999, 1.0]
_ALL_UP_TO = 12  # workers; up to here, the distribution is kept for every k
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.97, 0.99)


def chosen_places(header: dict[str, Any]) -> list[int]:
    """The k whose distributions are kept: all for few workers, else the first, the last, the quorum and a sample."""
    workers = int(header["workers"])
    if workers <= _ALL_UP_TO:
        return list(range(1, workers + 1))
    quorum = header["policy"].get("quorum")
    wanted = {1, workers, *(round(share * workers) for share in _SHARES)}
    wanted |= {quorum} if isinstance(quorum, int) else set()
    return sorted(place for place in wanted if 1 <= place <= workers)


class Arrivals(KthMeans):
    """Seconds from a version to its k-th arrival: means for all k, distributions for the chosen k."""

    def __init__(self, header: dict[str, Any]) -> None:
        super().__init__()
        self.run(header)
        self._chosen = {place: Durations(bins_per_e=400) for place in chosen_places(header)}

    def _keep(self, seconds: list[float]) -> None:
        super()._keep(seconds)
        for place, times in self._chosen.items():
            if place <= len(seconds):
                times.add(seconds[place - 1])

    def data(self) -> dict[str, Any] | None:
        """JSON values; None if the run had no rounds."""
        means_s = self.means_s()
        if means_s is None:
            return None
        return {
            "rounds": self.rounds,
            "short_rounds": self.short_rounds,
            "means": means_s,
            "counts": self.counts,
            "chosen": [
                {
                    "k": k,
                    "count": times.count,
                    "mean": times.mean_s,
                    "seconds": times.quantiles(_LEVELS),
                    "share": _LEVELS,
                }
                for k, times in self._chosen.items()
                if times.count
            ],
        }
