"""When the gradients of a round arrive: the mean for every k, the distribution for some."""

from __future__ import annotations

from typing import Any

from quorate.reporting.report.durations import Durations
from quorate.trace import Update

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


class Arrivals:
    """Seconds from a version to its k-th arrival.

    Rounds that ran out of batches are left out: the second arrival of a round of two says nothing of a round of
    eight. So are updates made of stale gradients, which belong to no round.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        self.rounds = self.short_rounds = self.updates = 0
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._chosen = {place: Durations(bins_per_e=400) for place in chosen_places(header)}
        self._version = 0
        self._opened_at = 0.0
        self._seconds: list[float] = []  # of the round that is open
        self._short = False

    def arrived(self, time: float, version: int) -> None:
        if version == self._version:
            self._seconds.append(time - self._opened_at)

    def exhausted(self) -> None:
        self._short = True

    def applied(self, time: float, update: Update) -> None:
        self.updates += 1
        if all(ticket.version == update.version - 1 for ticket in update.tickets):
            if self._short:
                self.short_rounds += 1
            else:
                self._keep()
        self._version, self._opened_at, self._short = update.version, time, False
        self._seconds.clear()

    def _keep(self) -> None:
        self.rounds += 1
        missing = len(self._seconds) - len(self._sums)
        if missing > 0:
            self._sums += [0.0] * missing
            self._counts += [0] * missing
        for place, seconds in enumerate(self._seconds):
            self._sums[place] += seconds
            self._counts[place] += 1
            if place + 1 in self._chosen:
                self._chosen[place + 1].add(seconds)

    def data(self) -> dict[str, Any] | None:
        """None where the run had no rounds."""
        if not self.rounds or 2 * (self.rounds + self.short_rounds) < self.updates:
            return None
        return {
            "rounds": self.rounds,
            "short_rounds": self.short_rounds,
            "means": [total / count for total, count in zip(self._sums, self._counts, strict=True)],
            "counts": self._counts,
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
