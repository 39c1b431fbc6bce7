"""When the gradients of a round arrive: the mean for every k, the distribution for some."""

from __future__ import annotations

from typing import Any

from quorate.reporting.report.durations import Durations
from quorate.reporting.rounds import KthMeans

_LEVELS = [0.001, *(step / 100 for step in range(1, 100)), 0.999, 1.0]
_ALL_UP_TO = 12  # workers: then the distribution is kept for every k
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.97, 0.99)


def chosen_places(header: dict[str, Any]) -> list[int]:
    """The k whose distributions are kept: all of few workers, otherwise first, last, quorum and shares between."""
    workers = int(header["workers"])
    if workers <= _ALL_UP_TO:
        return list(range(1, workers + 1))
    policy = header["policy"]
    wanted = {1, workers, *(round(share * workers) for share in _SHARES)}
    wanted |= {int(policy[name]) for name in ("quorum", "k") if isinstance(policy.get(name), int)}
    return sorted(place for place in wanted if 1 <= place <= workers)


class Arrivals(KthMeans):
    """Seconds from a version to its k-th arrival: means, and distributions of some k."""

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
        """None where the run had no rounds."""
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
                    "k": place,
                    "count": times.count,
                    "mean": times.mean_s,
                    "seconds": times.quantiles(_LEVELS),
                    "share": _LEVELS,
                }
                for place, times in self._chosen.items()
                if times.count
            ],
        }
