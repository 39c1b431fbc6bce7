"""Reads a trace, or a table of step times, in one pass and in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quorate.coordinator import LIMIT_REACHED
from quorate.errors import BadInput
from quorate.events import Parts, Ticket
from quorate.latency.step_times import PHASES, WAITING, StepTimes, is_table, read_step_times
from quorate.metrics import Curve, Metrics
from quorate.policies import FullSync
from quorate.reporting.report.slowness import Arrivals, Pace, worker_rows
from quorate.reporting.report.timeline import CANCELLED, DROPPED, GONE, LOST, USED, HeatMap, Timeline
from quorate.trace import TRACE_FILE, Recorder, Update, feed, own_seconds, read_lenient, works_ahead

#: Timeline segments in a page, over all runs: about 15 bytes each.
MOST_SEGMENTS = 160_000
_MOST_CHOICES = 2000
#: Engine name for step times of a script that quorate did not run.
MEASURED = "measured"


class Choices:
    """Quorums chosen by an adaptive policy."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[dict[str, Any]] = []

    def add(self, time: float, version: int, quorum: int, reason: str) -> None:
        """Keep a choice if it changes the quorum; of too many, keep the first and the latest half."""
        self.count += 1
        if not self.kept or self.kept[-1]["quorum"] != quorum:
            self.kept.append({"time": time, "version": version, "quorum": quorum, "reason": reason})
            if len(self.kept) > _MOST_CHOICES:
                del self.kept[1 : _MOST_CHOICES // 2]


class Gatherer(Recorder):
    """Recorder that gathers the data of a report."""

    def __init__(self, most_segments: int = MOST_SEGMENTS) -> None:
        self.metrics = Metrics()
        self.measures: dict[str, Curve] = {}
        self.paces: dict[int, Pace] = {}
        self.choices = Choices()
        self.end: str | None = None  # end reason; None if the run broke off
        self.arrivals: Arrivals
        self.timeline: Timeline
        self.heat: HeatMap
        self._most_segments = most_segments
        self._now = 0.0
        self._flights: dict[int, tuple[int, float]] = {}  # worker -> ticket, start
        self._waiting: dict[int, tuple[int, float, float]] = {}  # arrived ticket -> worker, start, arrival
        self._gone: dict[int, float] = {}  # lost worker -> time of the loss

    def run(self, header: dict[str, Any]) -> None:
        self.metrics.run(header)
        self.arrivals = Arrivals(header)
        self.timeline = Timeline(header["workers"], self._most_segments)
        self.heat = HeatMap(header["workers"])

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        self.metrics.joined(time, worker, incarnation)
        self.paces.setdefault(worker, Pace())
        if worker in self._gone:
            self.timeline.add(worker, GONE, self._gone.pop(worker), time)

    def started(self, time: float, ticket: Ticket) -> None:
        self.metrics.started(time, ticket)
        self.arrivals.started(ticket.version)
        self._flights[ticket.worker] = (ticket.id, time)

    def exhausted(self, time: float, worker: int) -> None:
        self.arrivals.exhausted()

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        self._now = time
        self.metrics.arrived(time, ticket, parts)
        self.arrivals.arrived(time, ticket.version, ticket.worker)
        _, start = self._flights.pop(ticket.worker)
        self._waiting[ticket.id] = (ticket.worker, start, time)
        own_s = own_seconds(time - start, parts, works_ahead(self.metrics.header))
        self.paces[ticket.worker].arrived(own_s, parts)
        self.heat.add(ticket.worker, ticket.version, own_s)

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
        """A ticket that was not applied ends: at its arrival if it had arrived, else now."""
        self._now = max(self._now, time)
        if ticket.id in self._waiting:
            worker, start, arrival = self._waiting.pop(ticket.id)
            self.timeline.add(worker, kind, start, arrival)
            return
        _, start = self._flights.pop(ticket.worker)
        self.timeline.add(ticket.worker, kind, start, time)
        self.paces[ticket.worker].durations.add_cut(time - start)
        self.heat.add(ticket.worker, ticket.version, time - start)

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
        """End a run without an end record at its last record."""
        self._over(self._now, None)

    def _over(self, time: float, digest: str | None) -> None:
        self.metrics.ended(time, self.metrics.updates, self.end or "broke off", digest)
        for worker, since in self._gone.items():
            self.timeline.add(worker, GONE, since, time)
        self._close_stretch(time)


@dataclass(kw_only=True)
class Gathered:
    """The gathered data of one run."""

    path: Path  # as the user gave it
    gatherer: Gatherer
    sources: tuple[Path, ...]  # for the planner
    left_out: str | None = None  # a sentence, if the trace is torn
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> Metrics:
        return self.gatherer.metrics

    @property
    def header(self) -> dict[str, Any]:
        return self.gatherer.metrics.header

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The workers, slowest first."""
        return worker_rows(self.gatherer.paces, self.metrics.workers, self.header)


def gather(path: Path, most_segments: int = MOST_SEGMENTS) -> Gathered:
    """Read a trace; a torn one up to its last complete record."""
    gatherer = Gatherer(most_segments)
    sentences: list[str] = []
    feed(read_lenient(path, sentences.append), gatherer)
    if gatherer.end is None:
        gatherer.broke_off()
    left_out = sentences[0] if sentences else None
    return Gathered(path=path, gatherer=gatherer, sources=(path,), left_out=left_out)


def _place(comparison: Path, name: str) -> tuple[int, str]:
    """Sort key: runs of a comparison in its order, since speed-ups are over the first; other runs by name."""
    try:
        order = list(json.loads((comparison / "summary.json").read_text(encoding="utf-8"))["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        order = []
    return (order.index(name) if name in order else len(order), name)


def are_tables(given: list[Path]) -> bool:
    """Whether the paths are step times instead of runs."""
    kinds = {is_table(path) for path in given}
    if len(kinds) > 1:
        raise BadInput("runs and step times (CSV) are given together; make a page of each")
    return kinds == {True}


def find_runs(given: list[Path]) -> list[Path]:
    """The runs at these paths: traces, folders of runs, and folders of several runs such as a comparison."""
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


def gather_steps(paths: Sequence[Path]) -> Gathered:
    """Read step times: one table, or one table per worker."""
    found = read_step_times(paths)
    gatherer = Gatherer()
    gatherer.run(_header(found, paths))
    for worker in found.workers:
        gatherer.joined(0.0, worker, 0)
    now, number = 0.0, 0
    waits = found.more.get(WAITING, {})
    for version, (step, row) in enumerate(found.times.items()):
        tickets = [Ticket(number + place, worker, 0, version, number + place, 1) for place, worker in enumerate(row)]
        number += len(tickets)
        for ticket in tickets:
            gatherer.started(now, ticket)
        tickets.sort(key=lambda ticket: row[ticket.worker])
        for ticket in tickets:
            gatherer.arrived(now + row[ticket.worker], ticket, None)
        # The last worker waits for no other worker: the shortest wait is the all-reduce.
        now += max(row.values()) + min(waits.get(step, {}).values(), default=0.0)
        gatherer.applied(now, Update(version + 1, tuple(tickets), None, "all arrived", None, None))
    gatherer.ended(now, len(found.times), LIMIT_REACHED, None)
    for phase in PHASES:
        for worker, mean_s in found.means(phase).items():
            gatherer.paces[worker].parts_s[phase] = mean_s
            gatherer.paces[worker].with_parts = 1
    return Gathered(path=paths[0], gatherer=gatherer, sources=tuple(paths), notes=tuple(found.notes))


def _header(found: StepTimes, paths: Sequence[Path]) -> dict[str, Any]:
    name = paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"
    nothing = dict.fromkeys(("task", "seed", "samples", "batch_size", "updates", "epochs", "until", "parameter_bytes"))
    return {
        **nothing,
        "label": name,
        "policy": {"name": FullSync.name},
        "engine": {"name": MEASURED},
        "workers": found.workers[-1] + 1,
        "processes": len(found.workers),
        "first_step": next(iter(found.times)),
        "has_all_reduce": WAITING in found.more,
    }
