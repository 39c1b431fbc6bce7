"""Arrival times within rounds, with one definition of a round for the report, the live view and comparisons."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from quorate.metrics import KthArrivals, round_quorum
from quorate.trace import Update


class WholeRounds(KthArrivals):
    """Arrival times of the rounds in which every worker took part.

    The last round of an epoch has fewer batches, so its arrival times are not comparable with those of whole rounds.
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


_MOST_ARRIVALS = 200_000  # kept of full rounds; a longer run keeps every second, fourth, … round


class FullRound(NamedTuple):
    """A round that waited for every worker."""

    seconds: list[float]  # arrival times, ascending
    workers: list[int]  # in the order of arrival
    took_s: float  # from version to version


class Waiting(NamedTuple):
    """Seconds that full rounds spent waiting for some workers after all other workers had arrived."""

    cost_s: float
    took_s: float  # sum over these rounds
    rounds: int
    gradients: float  # in an update, on average


class KthMeans:
    """Mean seconds from a version to its k-th arrival.

    Three kinds of arrivals are left out. Rounds that ran out of batches: the second arrival of a round of two is not
    comparable with that of a round of eight. Updates from stale gradients: they belong to no round. Arrivals beyond a
    fixed quorum: they are seen only if they coincide with the last one, so they would bias the mean downwards.
    """

    def __init__(self, recent: int | None = None) -> None:
        self.most: int | None = None  # arrivals of a round that count; None: all
        self.full: deque[FullRound] = deque(maxlen=recent)  # the latest `recent` rounds, or a sample of all
        self._stride = 1
        self._full_rounds = 0
        self.rounds = self.short_rounds = self.updates = 0
        self.sums: list[float] = []
        self.counts: list[int] = []
        self._version = 0
        self._opened_at = 0.0
        self._seconds: list[float] = []  # of the open round
        self._workers: list[int] = []
        self._started = 0
        self._short = False

    def started(self, version: int) -> None:
        self._started += version == self._version

    def arrived(self, time: float, version: int, worker: int) -> None:
        if version == self._version:
            self._seconds.append(time - self._opened_at)
            self._workers.append(worker)

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
                if len(update.tickets) == len(self._seconds) == self._started > 1:
                    self._keep_full(FullRound(self._seconds, self._workers, time - self._opened_at))
        self._version, self._opened_at, self._short, self._started = update.version, time, False, 0
        self._seconds, self._workers = [], []

    def run(self, header: dict[str, Any]) -> None:
        self.most = round_quorum(header)
        if self.full.maxlen is not None:  # fewer rounds with many workers: the live view reads them twice a second
            self.full = deque(maxlen=max(4, min(self.full.maxlen, _MOST_ARRIVALS // 4 // header["workers"])))

    def _keep(self, seconds: list[float]) -> None:
        self.rounds += 1
        missing = len(seconds) - len(self.sums)
        if missing > 0:
            self.sums += [0.0] * missing
            self.counts += [0] * missing
        for place, one_s in enumerate(seconds):
            self.sums[place] += one_s
            self.counts[place] += 1

    def _keep_full(self, one: FullRound) -> None:
        self._full_rounds += 1
        if self._full_rounds % self._stride == 0:
            self.full.append(one)
            if self.full.maxlen is None and len(self.full) * len(one.workers) > _MOST_ARRIVALS:
                self.full = deque(list(self.full)[1::2])
                self._stride *= 2

    def waiting_for(self, workers: set[int]) -> Waiting | None:
        """The cost of waiting for these workers in full rounds; None if most updates are not full rounds."""
        cost_s = took_s = 0.0
        rounds = gradients = 0
        for one in self.full:
            others = [
                after_s for after_s, worker in zip(one.seconds, one.workers, strict=True) if worker not in workers
            ]
            if others:
                cost_s += one.seconds[-1] - others[-1]
                took_s += one.took_s
                gradients += len(one.workers)
                rounds += 1
        if not rounds or 2 * rounds * self._stride < min(self.updates, self.full.maxlen or self.updates):
            return None
        return Waiting(cost_s * self._stride, took_s * self._stride, rounds * self._stride, gradients / rounds)

    def means_s(self) -> list[float] | None:
        """Means for k = 1, 2, …; None if the run has no rounds, as with async."""
        if not self.rounds or 2 * (self.rounds + self.short_rounds) < self.updates:
            return None
        return [total / count for total, count in zip(self.sums, self.counts, strict=True)]
