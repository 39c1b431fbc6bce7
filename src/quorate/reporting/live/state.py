"""What the live view knows of a run: `Metrics`, and besides the recent past and where each worker stands.

Memory is bounded by the number of workers, whatever the length of the run.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

from quorate.coordinator import DATA_USED_UP, LIMIT_REACHED
from quorate.errors import BadInput
from quorate.events import Parts, Ticket
from quorate.ledger import Ledger
from quorate.limits import Limits
from quorate.metrics import Evaluation, Metrics
from quorate.policies import make_policy
from quorate.reporting.rounds import KthMeans
from quorate.trace import Update

RECENT_UPDATES = 200
NEWEST_CHOICES = 8
MEASURES = 8  # of a task that has more, the first so many are drawn
_SMOOTHING = 0.1  # weight of the newest ticket in a worker's recent pace

# Policies whose updates in an epoch are known beforehand; those of the others follow from what arrives.
_SAME_COUNT_EVERY_UPDATE = ("full-sync", "backup", "k-batch", "async", "bounded")

COMPUTING, WAITING, LATE, LOST = "computing", "waiting", "late", "lost"


class Point(NamedTuple):
    """Some neighbouring values of a long series as one."""

    time: float  # of the last of them
    mean: float
    low: float
    high: float


class Series:
    """A long series in a bounded number of points, each standing for as many values as the others."""

    def __init__(self, most: int = 300) -> None:
        self._most = most
        self._size = 1  # values in a point
        self._full: list[tuple[Point, int]] = []
        self._time = 0.0
        self._count = 0
        self._total, self._low, self._high = 0.0, math.inf, -math.inf

    def add(self, time: float, value: float) -> None:
        if not math.isfinite(value):
            return
        self._time = time
        self._count += 1
        self._total += value
        if value < self._low:
            self._low = value
        if value > self._high:
            self._high = value
        if self._count >= self._size:
            self._full.append((self._begun(), self._count))
            self._count, self._total, self._low, self._high = 0, 0.0, math.inf, -math.inf
            if len(self._full) >= self._most:
                pairs = zip(self._full[::2], self._full[1::2], strict=False)
                self._full = [_merged(*one, *other) for one, other in pairs]
                self._size *= 2

    def points(self) -> list[Point]:
        full = [point for point, _ in self._full]
        return [*full, self._begun()] if self._count else full

    def _begun(self) -> Point:
        return Point(self._time, self._total / self._count, self._low, self._high)


def _merged(one: Point, ones: int, other: Point, others: int) -> tuple[Point, int]:
    count = ones + others
    mean = (one.mean * ones + other.mean * others) / count
    return Point(other.time, mean, min(one.low, other.low), max(one.high, other.high)), count


class Worker:
    """Where a worker stands, and how quick it was of late."""

    __slots__ = ("drop_share", "pace_s", "started_at", "state")

    def __init__(self) -> None:
        self.state = WAITING
        self.pace_s: float | None = None  # a ticket, smoothed
        self.drop_share = 0.0  # of its tickets, smoothed
        self.started_at = 0.0

    def took(self, seconds: float) -> None:
        self.pace_s = seconds if self.pace_s is None else self.pace_s + _SMOOTHING * (seconds - self.pace_s)


class Choice(NamedTuple):
    """What a policy that adapts chose, and why."""

    time: float
    version: int
    quorum: int
    reason: str


class LiveMetrics(Metrics):
    """The metrics of a run that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = KthMeans()
        self.losses = Series()
        self.paces = Series()  # seconds an update
        self.measures: dict[str, Series] = {}
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT_UPDATES)  # when, and seconds since the one before
        self.standing: dict[int, Worker] = {}
        self.choices: deque[Choice] = deque(maxlen=NEWEST_CHOICES)
        self.quorums = Series()
        self.ending: str | None = None  # why the run is over
        self.resumed_at: list[int] = []  # versions, the newest few
        self.expected_updates: int | None = None  # where that is known beforehand
        self._limits: dict[str, Any] = {}
        self._updated_at = 0.0

    # ------------------------------------------------------------ what happens

    def run(self, header: dict[str, Any]) -> None:
        super().run(header)
        self.rounds.run(header)
        self._limits = header
        self.expected_updates = self._expected()

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        super().joined(time, worker, incarnation)
        standing = self.standing.get(worker)
        if standing is None:
            self.standing[worker] = Worker()
        else:
            standing.state = WAITING

    def started(self, time: float, ticket: Ticket) -> None:
        super().started(time, ticket)
        worker = self.standing[ticket[1]]
        worker.started_at = time
        if worker.state is not LATE:
            worker.state = COMPUTING

    def exhausted(self, time: float, worker: int) -> None:
        self.rounds.exhausted()

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        super().arrived(time, ticket, parts)
        self.rounds.arrived(time, ticket[3])
        worker = self.standing[ticket[1]]
        worker.state = WAITING
        worker.drop_share *= 1 - _SMOOTHING
        seconds = time - worker.started_at
        pace = worker.pace_s
        worker.pace_s = seconds if pace is None else pace + _SMOOTHING * (seconds - pace)

    def applied(self, time: float, update: Update) -> None:
        super().applied(time, update)
        self.rounds.applied(time, update)
        seconds = time - self._updated_at
        self._updated_at = time
        self.recent.append((time, seconds))
        self.paces.add(time, seconds)
        if update.loss is not None:
            self.losses.add(time, update.loss)

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        super().dropped(time, ticket, reason)
        worker = self.standing[ticket.worker]
        worker.drop_share += _SMOOTHING
        worker.state = LATE

    def refused(self, time: float, ticket: Ticket) -> None:
        super().refused(time, ticket)
        worker = self.standing[ticket.worker]
        worker.drop_share += _SMOOTHING * (1 - worker.drop_share)
        worker.state = LATE

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        super().cancelled(time, ticket, reason)
        worker = self.standing[ticket.worker]
        worker.state = LATE
        worker.drop_share += _SMOOTHING * (1 - worker.drop_share)
        seconds = time - worker.started_at
        if worker.pace_s is None or seconds > worker.pace_s:  # it took at least that long; of less nothing is known
            worker.took(seconds)

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        super().lost(time, worker, tickets)
        self.standing[worker].state = LOST

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        self.evaluations = [Evaluation(time, version, self.samples_applied, measures)]  # the past is in the series
        for name, value in measures.items():
            series = self.measures.get(name)
            if series is None:
                if len(self.measures) >= MEASURES:
                    continue
                series = self.measures[name] = Series()
            series.add(time, value)

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        self.choices.append(Choice(time, version, quorum, reason))
        self.quorums.add(time, quorum)

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        super().resumed(time, version, limits)
        self._limits = limits
        self.expected_updates = self._expected()
        self.resumed_at = [*self.resumed_at[-4:], version]

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        super().ended(time, version, reason, digest)
        self.ending = reason
        for worker in self.standing.values():  # what was open was dropped; nobody was late
            if worker.state is not LOST:
                worker.state = WAITING

    # ------------------------------------------------------------ how far it is

    def _own_limits(self) -> Limits | None:
        try:
            limits = self._limits
            return Limits(updates=limits["updates"], epochs=limits["epochs"], until=limits["until"])
        except (BadInput, KeyError, TypeError, ValueError):  # a header that says less than ours do
            return None

    def _expected(self) -> int | None:
        header, own = self.header, self._own_limits()
        if own is None or own.updates is not None or own.epochs is None:
            return None if own is None else own.updates
        try:
            options = dict(header["policy"])
            name = options.pop("name")
            if name not in _SAME_COUNT_EVERY_UPDATE:
                return None
            ledger = Ledger(header["samples"], header["batch_size"], own.epochs, header["seed"])
            return own.expected_updates(ledger, make_policy(name, **options).begin(header["workers"]).per_update)
        except (BadInput, KeyError, TypeError, ValueError):
            return None

    def share(self) -> float | None:
        """Of the whole run, where that is known."""
        if self.ending in (LIMIT_REACHED, DATA_USED_UP):  # one that was stopped is as far as it is
            return 1.0
        own, samples = self._own_limits(), self.header.get("samples")
        if own is None:
            return None
        per_epoch = samples if isinstance(samples, int) else None
        return own.share(self.updates, self.seconds, self.samples_applied, per_epoch)
