"""How long things took, in memory that does not grow with their number."""

from __future__ import annotations

import math
from collections.abc import Sequence

_NOTHING = 1e-9  # seconds: what is shorter counts as this


class Durations:
    """Seconds in bins of equal ratio. Work that was cut short counts as having taken at least so long.

    Without that, a worker whose slow tickets are all cancelled would look quick. The estimate is Kaplan and Meier's:
    at every length, the share that ended there of those that got so far.
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
        """The longest that is known of, cut short or not."""
        keys = (*self._ended, *self._cut)
        return self._middle(max(keys)) if keys else None

    def quantiles(self, levels: Sequence[float]) -> list[float | None]:
        """Seconds within which these shares end; None where too much was cut short to know. Levels ascend."""
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
        return math.floor(math.log(max(seconds, _NOTHING)) * self._per_e)

    def _middle(self, key: int) -> float:
        return math.exp((key + 0.5) / self._per_e)
