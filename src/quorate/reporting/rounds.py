"""When the gradients of a round arrive: one rule of what a round is, for the report, the live view and comparisons."""

from __future__ import annotations

from typing import Any

from quorate.metrics import KthArrivals
from quorate.trace import Update


class WholeRounds(KthArrivals):
    """Arrival times of the rounds that every worker took part in.

    The last round of an epoch takes what is left; its second arrival may be its last, and says nothing of others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._workers = 0

    def run(self, header: dict[str, Any]) -> None:
        super().run(header)
        self._workers = header["workers"]

    def applied(self, time: float, update: Update) -> None:
        if len(update.tickets) < self._workers:
            for times in self.times[: self._place]:
                times.pop()
        super().applied(time, update)
        while self.times and not self.times[-1]:
            self.times.pop()


class KthMeans:
    """Mean seconds from a version to its k-th arrival.

    Rounds that ran out of batches are left out: the second arrival of a round of two says nothing of a round of
    eight. So are updates made of stale gradients, which belong to no round. Of a fixed quorum the arrivals beyond it
    are left out too: only rounds in which they came together with the last one have them, and those were quick.
    """

    def __init__(self) -> None:
        self.most: int | None = None  # arrivals of a round that count; None: all
        self.rounds = self.short_rounds = self.updates = 0
        self.sums: list[float] = []
        self.counts: list[int] = []
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
        before = update.version - 1
        if all(ticket.version == before for ticket in update.tickets):
            if self._short:
                self.short_rounds += 1
            else:
                self._keep(self._seconds[: self.most])
        self._version, self._opened_at, self._short = update.version, time, False
        self._seconds.clear()

    def run(self, header: dict[str, Any]) -> None:
        policy = header.get("policy") or {}
        self.most = next((policy[name] for name in ("quorum", "k") if isinstance(policy.get(name), int)), None)

    def _keep(self, seconds: list[float]) -> None:
        self.rounds += 1
        missing = len(seconds) - len(self.sums)
        if missing > 0:
            self.sums += [0.0] * missing
            self.counts += [0] * missing
        for place, one_s in enumerate(seconds):
            self.sums[place] += one_s
            self.counts[place] += 1

    def means_s(self) -> list[float] | None:
        """For k = 1, 2, …; None where the run has no rounds, as async has not."""
        if not self.rounds or 2 * (self.rounds + self.short_rounds) < self.updates:
            return None
        return [total / count for total, count in zip(self.sums, self.counts, strict=True)]
