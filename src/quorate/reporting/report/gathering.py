"""One pass over a trace, in memory that does not grow with the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorate.errors import BadInput
from quorate.events import Parts, Ticket
from quorate.metrics import Curve, Metrics
from quorate.reporting.report.arrivals import Arrivals
from quorate.reporting.report.slowness import Pace
from quorate.reporting.report.timeline import CANCELLED, DROPPED, GONE, LOST, USED, Timeline
from quorate.trace import TRACE_FILE, Recorder, Update, feed, own_seconds, read_lenient, works_ahead

#: Segments of the timeline that a page holds, of all its runs together: about 15 bytes each.
MOST_SEGMENTS = 160_000
_MOST_CHOICES = 2000


class Choices:
    """What an adaptive policy chose, and why."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[dict[str, Any]] = []

    def add(self, time: float, version: int, quorum: int, reason: str) -> None:
        """The quorum may be chosen again as it is; only changes are kept, and of too many the latest half."""
        self.count += 1
        if not self.kept or self.kept[-1]["quorum"] != quorum:
            self.kept.append({"time": time, "version": version, "quorum": quorum, "reason": reason})
            if len(self.kept) > _MOST_CHOICES:
                del self.kept[1 : _MOST_CHOICES // 2]


class Gatherer(Recorder):
    """Watches a run, or reads its trace, and keeps what a report shows."""

    def __init__(self, most_segments: int = MOST_SEGMENTS) -> None:
        self.metrics = Metrics()
        self.measures: dict[str, Curve] = {}
        self.paces: dict[int, Pace] = {}
        self.choices = Choices()
        self.end: str | None = None  # why the run ended; None if it broke off
        self.arrivals: Arrivals
        self.timeline: Timeline
        self._most_segments = most_segments
        self._now = 0.0
        self._flights: dict[int, tuple[int, float]] = {}  # worker -> its ticket, and since when
        self._waiting: dict[int, tuple[int, float, float]] = {}  # arrived ticket -> worker, start, arrival
        self._gone: dict[int, float] = {}  # lost worker -> since when

    def run(self, header: dict[str, Any]) -> None:
        self.metrics.run(header)
        self.arrivals = Arrivals(header)
        self.timeline = Timeline(header["workers"], self._most_segments)

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        self.metrics.joined(time, worker, incarnation)
        self.paces.setdefault(worker, Pace())
        if worker in self._gone:
            self.timeline.add(worker, GONE, self._gone.pop(worker), time)

    def started(self, time: float, ticket: Ticket) -> None:
        self.metrics.started(time, ticket)
        self._flights[ticket.worker] = (ticket.id, time)

    def exhausted(self, time: float, worker: int) -> None:
        self.arrivals.exhausted()

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        self._now = time
        self.metrics.arrived(time, ticket, parts)
        self.arrivals.arrived(time, ticket.version)
        _, start = self._flights.pop(ticket.worker)
        self._waiting[ticket.id] = (ticket.worker, start, time)
        own_s = own_seconds(time - start, parts, works_ahead(self.metrics.header))
        self.paces[ticket.worker].arrived(own_s, parts)

    def applied(self, time: float, update: Update) -> None:
        self._now = time
        self.metrics.applied(time, update)
        self.arrivals.applied(time, update)
        for ticket in update.tickets:
            worker, start, arrival = self._waiting.pop(ticket.id)
            self.timeline.add(worker, USED, start, arrival)
        if self.timeline.updated(time):
            self._close_stretch(time)

    def _close_stretch(self, time: float) -> None:
        for worker, (_, start) in self._flights.items():
            self.timeline.add_open(worker, start, time)
        for worker, start, arrival in self._waiting.values():
            self.timeline.add_open(worker, start, arrival)
        self.timeline.close(time)

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        self.metrics.dropped(time, ticket, reason)
        self._ended(time, ticket, DROPPED)

    def refused(self, time: float, ticket: Ticket) -> None:
        self.metrics.refused(time, ticket)
        self._ended(time, ticket, DROPPED)

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        self.metrics.cancelled(time, ticket, reason)
        self._ended(time, ticket, CANCELLED)

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        self._now = time
        self.metrics.lost(time, worker, tickets)
        for ticket in tickets:
            self._ended(time, ticket, LOST)
        self._gone.setdefault(worker, time)

    def _ended(self, time: float, ticket: Ticket, kind: int) -> None:
        """A ticket made no version. One that had arrived is over since then; one in flight is cut short."""
        self._now = max(self._now, time)
        if ticket.id in self._waiting:
            worker, start, arrival = self._waiting.pop(ticket.id)
            self.timeline.add(worker, kind, start, arrival)
            return
        _, start = self._flights.pop(ticket.worker)
        self.timeline.add(ticket.worker, kind, start, time)
        self.paces[ticket.worker].durations.add_cut(time - start)

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        self._now = time
        self.metrics.evaluated(time, version, measures)
        for name, value in measures.items():
            self.measures.setdefault(name, Curve()).add(time, version, self.metrics.samples_applied, value)

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        self.choices.add(time, version, quorum, reason)

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        self.end = reason
        self._over(time, digest)

    def broke_off(self) -> None:
        """No end is recorded: the run is over where its trace is."""
        self._over(self._now, None)

    def _over(self, time: float, digest: str | None) -> None:
        self.metrics.ended(time, self.metrics.updates, self.end or "broke off", digest)
        for worker, since in self._gone.items():
            self.timeline.add(worker, GONE, since, time)
        self._close_stretch(time)


class _Counted:
    """Records, and how many there have been."""

    def __init__(self, records: Iterator[dict[str, Any]]) -> None:
        self._records = records
        self.count = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record in self._records:
            self.count += 1
            yield record


class Gathered:
    """A trace that was read."""

    def __init__(self, path: Path, gatherer: Gatherer, left_out: str | None) -> None:
        self.path = path  # as it was given
        self.gatherer = gatherer
        self.left_out = left_out  # a sentence, where the trace is not whole

    @property
    def metrics(self) -> Metrics:
        return self.gatherer.metrics

    @property
    def header(self) -> dict[str, Any]:
        return self.gatherer.metrics.header


def gather(path: Path, most_segments: int = MOST_SEGMENTS) -> Gathered:
    """Read a trace once. A torn one is read up to where it is whole."""
    gatherer = Gatherer(most_segments)
    sentences: list[str] = []
    records = _Counted(read_lenient(path, sentences.append))
    try:
        feed(records, gatherer)
    except BadInput:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadInput(
            f"trace {str(path)!r} does not hang together: line {records.count} does not follow from those before it; "
            f"it was changed after the run, give it as it was written"
        ) from error
    if gatherer.end is None:
        gatherer.broke_off()
    return Gathered(path, gatherer, sentences[0] if sentences else None)


def _place(comparison: Path, name: str) -> tuple[int, str]:
    """Runs of a comparison in its order, the first being what others are held against; any others by name."""
    try:
        order = list(json.loads((comparison / "summary.json").read_text(encoding="utf-8"))["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        order = []
    return (order.index(name) if name in order else len(order), name)


def find_runs(given: list[Path]) -> list[Path]:
    """The runs that were named: traces, folders of runs, and folders that hold several (as of a comparison)."""
    found: list[Path] = []
    for path in given:
        if not path.is_dir() or (path / TRACE_FILE).exists():
            found.append(path)
            continue
        inside = sorted(path.glob(f"*/{TRACE_FILE}"), key=lambda trace: _place(path, trace.parent.name))
        if not inside:
            raise BadInput(
                f"the folder {str(path)!r} holds no run: there is no {TRACE_FILE} in it nor one level below; "
                f"give the folder of a run, or make one with quorate train --out {path}"
            )
        found += [trace.parent for trace in inside]
    seen: set[Path] = set()
    for path in found:
        real = (path / TRACE_FILE if path.is_dir() else path).resolve()
        if real in seen:
            raise BadInput(f"the run {str(path)!r} is given twice; name each run once")
        seen.add(real)
    return found
