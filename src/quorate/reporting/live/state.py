"""Metrics of the live view, and their snapshot: one JSON object of bounded size.

Memory depends on the number of workers, not on the length of the run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from quorate.coordinator import DATA_USED_UP, LIMIT_REACHED
from quorate.errors import BadInput
from quorate.events import Parts, Ticket
from quorate.ledger import Ledger
from quorate.metrics import Evaluation, Metrics
from quorate.reporting.comparison import REAL, policy_label, seconds_are, subject
from quorate.reporting.findings import Finding, finding, who_is_slow
from quorate.reporting.report.slowness import IN_WORDS, PARTS, SLOW, mark_slow_in, usual
from quorate.reporting.rounds import KthMeans
from quorate.run import Limits
from quorate.trace import Update, own_seconds

RECENT_UPDATES = 200
NEWEST_CHOICES = 8
MEASURES = 8  # a task with more has only the first ones drawn
_TYPICAL_OF = 31  # latest tickets of a worker whose median is its typical time
_SMOOTHING = 0.1  # weight of the newest ticket in a worker's recent pace

COMPUTING, WAITING, LATE, LOST = "computing", "waiting", "late", "lost"


class Point(NamedTuple):
    """Several neighbouring values of a long series, merged."""

    time: float  # of the last value
    mean: float
    low: float
    high: float


class Series:
    """A long series in a bounded number of points, each merged from the same number of values."""

    def __init__(self, most: int = 300) -> None:
        self._most = most
        self._size = 1  # values in a point
        self._full: list[Point] = []
        self._time = 0.0
        self._begin()

    def _begin(self) -> None:
        self._count, self._total, self._low, self._high = 0, 0.0, math.inf, -math.inf

    def add(self, time: float, value: float) -> None:
        if not math.isfinite(value):
            return
        self._time = time
        self._count += 1
        self._total += value
        self._low, self._high = min(self._low, value), max(self._high, value)
        if self._count == self._size:
            self._full.append(self._open_point())
            self._begin()
        if len(self._full) >= self._most:
            pairs = zip(self._full[::2], self._full[1::2], strict=False)
            self._full = [
                Point(other.time, (one.mean + other.mean) / 2, min(one.low, other.low), max(one.high, other.high))
                for one, other in pairs
            ]
            self._size *= 2

    def points(self) -> list[Point]:
        return [*self._full, self._open_point()] if self._count else list(self._full)

    def _open_point(self) -> Point:
        return Point(self._time, self._total / self._count, self._low, self._high)


class WorkerView:
    """State and recent pace of one worker."""

    __slots__ = ("drop_share", "pace_s", "parts_s", "recent_s", "started_at", "state")

    def __init__(self) -> None:
        self.state = WAITING
        self.pace_s: float | None = None  # seconds per ticket, smoothed
        self.recent_s: deque[float] = deque(maxlen=_TYPICAL_OF)
        self.parts_s: Parts | None = None  # seconds per part of a ticket, smoothed
        self.drop_share = 0.0  # of its tickets, smoothed
        self.started_at = 0.0

    @property
    def typical_s(self) -> float | None:
        """Median of the latest tickets, so that one late ticket does not make a worker slow."""
        return median(self.recent_s) if self.recent_s else None

    def was_late(self) -> None:
        self.state = LATE
        self.drop_share += _SMOOTHING * (1 - self.drop_share)

    def took(self, seconds: float) -> None:
        self.recent_s.append(seconds)
        self.pace_s = seconds if self.pace_s is None else self.pace_s + _SMOOTHING * (seconds - self.pace_s)


class Choice(NamedTuple):
    """A quorum chosen by an adaptive policy."""

    time: float
    version: int
    quorum: int
    reason: str


class LiveMetrics(Metrics):
    """Metrics of a run in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = KthMeans(recent=RECENT_UPDATES)
        self.losses = Series()
        self.paces = Series()  # seconds an update
        self.measures: dict[str, Series] = {}
        self.recent_s: deque[float] = deque(maxlen=RECENT_UPDATES)  # seconds of the latest updates
        self.standing: dict[int, WorkerView] = {}
        self.choices: deque[Choice] = deque(maxlen=NEWEST_CHOICES)
        self.quorums = Series()
        self.ending: str | None = None  # end reason of the run
        self.resumed_at: list[int] = []  # versions, the newest few
        self.expected_updates: int | None = None  # None if it is not known beforehand
        self._limits: dict[str, Any] = {}
        self._updated_at = 0.0

    # ------------------------------------------------------------ recorder methods

    def run(self, header: dict[str, Any]) -> None:
        super().run(header)
        self.rounds.run(header)
        self._limits = header
        self.expected_updates = self._expected()

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        super().joined(time, worker, incarnation)
        self.standing.setdefault(worker, WorkerView()).state = WAITING

    def started(self, time: float, ticket: Ticket) -> None:
        super().started(time, ticket)
        self.rounds.started(ticket[3])
        worker = self.standing[ticket[1]]
        worker.started_at = time
        if worker.state is not LATE:
            worker.state = COMPUTING

    def exhausted(self, time: float, worker: int) -> None:
        self.rounds.exhausted()

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        super().arrived(time, ticket, parts)
        self.rounds.arrived(time, ticket[3], ticket[1])
        worker = self.standing[ticket[1]]
        worker.state = WAITING
        worker.drop_share *= 1 - _SMOOTHING
        worker.took(own_seconds(time - worker.started_at, parts, self._works_ahead))
        if parts is not None:
            before = worker.parts_s or parts
            worker.parts_s = Parts(*(old + _SMOOTHING * (new - old) for old, new in zip(before, parts, strict=True)))

    def applied(self, time: float, update: Update) -> None:
        super().applied(time, update)
        self.rounds.applied(time, update)
        seconds = time - self._updated_at
        self._updated_at = time
        self.recent_s.append(seconds)
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
        self.standing[ticket.worker].was_late()

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        super().cancelled(time, ticket, reason)
        worker = self.standing[ticket.worker]
        worker.was_late()
        seconds = time - worker.started_at
        if worker.pace_s is None or seconds > worker.pace_s:  # a lower bound; below the pace it carries no information
            worker.took(seconds)

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        super().lost(time, worker, tickets)
        self.standing[worker].state = LOST

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        # Only the newest: earlier evaluations are in the series.
        self.evaluations = [Evaluation(time, version, self.samples_applied, measures)]
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
        for worker in self.standing.values():  # the open tickets were dropped by the end, not for being late
            if worker.state is not LOST:
                worker.state = WAITING

    # ------------------------------------------------------------ progress

    def _own_limits(self) -> Limits | None:
        try:
            limits = self._limits
            return Limits(updates=limits["updates"], epochs=limits["epochs"], until=limits["until"])
        except (BadInput, KeyError, TypeError, ValueError):  # a header of another version may lack fields
            return None

    def _expected(self) -> int | None:
        header, own = self.header, self._own_limits()
        if own is None or own.updates is not None or own.epochs is None:
            return None if own is None else own.updates
        try:
            if type(header["per_update"]) is not int or header["per_update"] < 1:  # the number of gradients varies
                return None
            ledger = Ledger(header["samples"], header["batch_size"], own.epochs, header["seed"])
            return own.expected_updates(ledger, header["per_update"])
        except (BadInput, KeyError, TypeError, ValueError):
            return None

    def share(self) -> float | None:
        """Finished share of the run; None if unknown."""
        if self.ending in (LIMIT_REACHED, DATA_USED_UP):  # a run that was stopped keeps its share
            return 1.0
        own, samples = self._own_limits(), self.header.get("samples")
        if own is None:
            return None
        per_epoch = samples if isinstance(samples, int) else None
        return own.share(self.updates, self.seconds, self.samples_applied, per_epoch)


EVERY_WORKER = 200  # with more workers, only the slowest are listed
SLOWEST = 50
KTH_POINTS = 100
STALENESS_BARS = 40
REASONS = 8
_TEXT_LENGTH = 200  # longer names and reasons are truncated


def snapshot(metrics: LiveMetrics, path: Path | None = None) -> dict[str, Any]:
    """Everything that the live view shows. Its size does not grow with the run, nor beyond some 200 workers."""
    header = metrics.header
    usual_s, rows = _worker_rows(metrics)
    return {
        "run": _run(header),
        "findings": _findings(metrics, rows, path),
        "updates": metrics.updates,
        "expected_updates": metrics.expected_updates,
        "share": metrics.share(),
        "seconds": metrics.seconds,
        "ending": _text(metrics.ending),
        "resumed_at": metrics.resumed_at,
        "pace": _pace(metrics),
        "loss": _last_and_curve(metrics.last_loss, metrics.losses.points()),
        "measures": _measures(metrics),
        "kth_arrival_s": _kth(metrics.rounds.means_s() or []),
        "staleness": _staleness(metrics),
        "tickets": _tickets(metrics),
        "samples": metrics.samples_applied,
        "bytes": {"sent": metrics.bytes_sent, "used": metrics.bytes_used},
        "workers": _workers(metrics, usual_s, rows),
        "choices": [{**choice._asdict(), "reason": _text(choice.reason)} for choice in reversed(metrics.choices)],
        "quorum": _last_and_curve(metrics.choices[-1].quorum if metrics.choices else None, metrics.quorums.points()),
    }


def _run(header: dict[str, Any]) -> dict[str, Any]:
    policy, engine = header.get("policy") or {}, header.get("engine") or {}
    return {
        "task": _text(header.get("task")),
        "subject": _text(subject(header)),
        "policy": _text(policy_label(policy, header.get("workers"))),
        "engine": _text(engine.get("name")),
        "latency": _text(engine.get("latency")),
        "real": "name" not in engine or seconds_are(header) == REAL,
        "workers": _number(header.get("workers")),
        "seed": _number(header.get("seed")),
        "epochs": _number(header.get("epochs")),
        "until": _text(header.get("until")),
    }


def _number(value: object) -> int | float | None:
    """A number from a header; None if the header holds another type."""
    return value if isinstance(value, int | float) and abs(value) < 1e15 else None


def _text(value: object) -> str | None:
    """Text from a trace: truncated, and without control characters, which a terminal would execute."""
    if value is None:
        return None
    text = "".join(sign if sign.isprintable() else "�" for sign in str(value)[: _TEXT_LENGTH + 1])
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 1] + "…"


def _pace(metrics: LiveMetrics) -> dict[str, Any]:
    recent = sorted(metrics.recent_s)
    spent = sum(recent)
    times = metrics.update_seconds
    return {
        "per_s": metrics.updates / metrics.seconds if metrics.seconds > 0 else None,
        "recent_per_s": len(recent) / spent if spent > 0 else None,
        "mean_s": times.mean,
        "median_s": times.quantile(0.5),
        "p99_s": times.quantile(0.99),
        "recent_count": len(recent),
        "recent_median_s": _quantile(recent, 0.5),
        "recent_p90_s": _quantile(recent, 0.9),
        "recent_p99_s": _quantile(recent, 0.99),
        "curve": _curve(metrics.paces.points()),
    }


def _quantile(values: Sequence[float], level: float) -> float | None:
    return values[max(0, math.ceil(level * len(values)) - 1)] if values else None


def _curve(points: Iterable[Point]) -> dict[str, list[float]]:
    """Columns for a chart, with six digits."""
    columns = list(zip(*points, strict=True)) or [(), (), (), ()]
    return {
        name: [_six(value) for value in column]
        for name, column in zip(("time", "mean", "low", "high"), columns, strict=True)
    }


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def _last_and_curve(last: float | None, points: list[Point]) -> dict[str, Any]:
    return {"last": last, "curve": _curve(points)}


def _measures(metrics: LiveMetrics) -> list[dict[str, Any]]:
    newest = metrics.evaluations[-1].measures if metrics.evaluations else {}
    return [
        {"name": _text(name), **_last_and_curve(newest.get(name), series.points())}
        for name, series in metrics.measures.items()
    ]


def _kth(means: list[float]) -> dict[str, list[float]]:
    """Mean seconds to the k-th arrival; of many k a sample that includes the first and the last."""
    count = len(means)
    if count <= KTH_POINTS:
        places = list(range(count))
    else:
        places = [round(step * (count - 1) / (KTH_POINTS - 1)) for step in range(KTH_POINTS)]
    return {"k": [place + 1 for place in places], "mean_s": [_six(means[place]) for place in places]}


def _staleness(metrics: LiveMetrics) -> dict[str, Any]:
    counts = metrics.staleness
    most = max(counts, default=0)
    width = most // STALENESS_BARS + 1
    bars = [0] * (most // width + 1)
    for behind, count in counts.items():
        bars[behind // width] += count
    total = max(1, sum(bars))
    return {
        "mean": metrics.staleness_mean(),
        "max": most,
        "width": width,
        "shares": [_six(count / total) for count in bars] if counts else [],
    }


def _tickets(metrics: LiveMetrics) -> dict[str, Any]:
    reasons = sorted(metrics.drops.items(), key=lambda item: -item[1])
    shown = [{"reason": _text(reason), "count": count} for reason, count in reasons[:REASONS]]
    rest = sum(count for _, count in reasons[REASONS:])
    if rest:
        shown.append({"reason": "other reasons", "count": rest})
    return {
        "applied": metrics.applied_tickets,
        "dropped": metrics.dropped_tickets,
        "lost": metrics.lost_tickets,
        "drop_share": metrics.drop_rate(),
        "reasons": shown,
    }


def _findings(metrics: LiveMetrics, rows: list[dict[str, Any]], path: Path | None) -> list[Finding]:
    """Workers that have been slow lately, and lost workers."""
    found = who_is_slow(rows, metrics.rounds, metrics.workers, run_s=None, sources=[] if path is None else [path])
    gone = [number for number, worker in metrics.standing.items() if worker.state is LOST]
    if gone:
        who = f"Worker {gone[0]} is" if len(gone) == 1 else f"{len(gone)} workers are"
        found.append(finding("lost", f"{who} lost.", None, gone[:SLOWEST]))
    return found


def _worker_rows(metrics: LiveMetrics) -> tuple[float | None, list[dict[str, Any]]]:
    """The usual time of a ticket, and a row per worker as `who_is_slow` reads it."""
    standing = sorted(metrics.standing.items())
    typical_s = {number: worker.typical_s for number, worker in standing}
    here = (typical_s[number] for number, worker in standing if worker.state is not LOST)
    usual_s = usual([took_s for took_s in here if took_s is not None])
    rows = [
        {
            "worker": number,
            "slowness": took_s / usual_s if took_s is not None and usual_s else None,
            "median_s": took_s,
            "mean_s": worker.pace_s,
            "parts_s": None if worker.parts_s is None else dict(zip(PARTS, worker.parts_s, strict=True)),
        }
        for (number, worker), took_s in zip(standing, typical_s.values(), strict=True)
    ]
    mark_slow_in(rows, usual_s, metrics.header)
    return usual_s, rows


def _workers(metrics: LiveMetrics, usual_s: float | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    states = dict.fromkeys((COMPUTING, WAITING, LATE, LOST), 0)
    for worker in metrics.standing.values():
        states[worker.state] += 1
    listed = rows
    if len(rows) > EVERY_WORKER:
        listed = heapq.nlargest(SLOWEST, rows, key=lambda row: (row["median_s"] or 0.0, -row["worker"]))
    return {
        "count": len(rows),
        "states": states,
        "usual_s": usual_s,
        "slow": SLOW,
        "all_listed": len(listed) == len(rows),
        "rows": [_shown(metrics, row) for row in listed],
    }


def _shown(metrics: LiveMetrics, row: dict[str, Any]) -> dict[str, Any]:
    number = row["worker"]
    work, worker = metrics.workers[number], metrics.standing[number]
    return {
        "worker": number,
        "state": worker.state,
        "slowness": None if row["slowness"] is None else _six(row["slowness"]),
        "slow_in": IN_WORDS.get(row["slow_in"]),
        "pace_s": None if worker.pace_s is None else _six(worker.pace_s),
        "drop_share": _six(worker.drop_share),
        "arrived": work.arrived,
        "dropped": work.dropped,
        "lost": work.lost,
    }
