"""Slowness of workers: the seconds of their tickets, and the part in which a slow worker is slow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, median_low
from typing import Any

from quorate.events import Parts
from quorate.metrics import WorkerTotals
from quorate.reporting.report.arrivals import Durations

PARTS = ("data", "compute", "transfer")
MOST_SHOWN = 500
SLOW = 1.2  # factor over the usual time from which on a worker counts as slow
#: Parts of a ticket as sentences name them. Waiting: the seconds of a ticket that are in none of its parts.
IN_WORDS = {
    **{"data": "loading data", "compute": "computing", "transfer": "sending", "waiting": "waiting"},
    **{"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"},
}
_NOTICEABLE = 0.05  # share of the usual ticket by which a part must exceed its usual time to be named


class Pace:
    """The seconds of one worker's tickets."""

    def __init__(self) -> None:
        self.durations = Durations()
        self.parts_s: dict[str, float] = {}
        self.with_parts = 0

    def arrived(self, seconds: float, parts: Parts | None) -> None:
        self.durations.add(seconds)
        if parts is not None:
            self.with_parts += 1
            for name, part_s in zip(PARTS, parts, strict=True):
                self.parts_s[name] = self.parts_s.get(name, 0.0) + part_s

    def means_s(self) -> dict[str, float] | None:
        return {name: total / self.with_parts for name, total in self.parts_s.items()} if self.with_parts else None


def usual(seconds: Sequence[float]) -> float | None:
    """The lower median. Of two workers that is the faster one; with the mean of both, neither would be slow."""
    return median_low(seconds) if seconds else None


def worker_rows(paces: dict[int, Pace], works: dict[int, WorkerTotals], header: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per worker, the slowest first. Slowness is the median ticket relative to that of the usual worker."""
    rows = [_row(worker, paces.get(worker) or Pace(), work) for worker, work in works.items()]
    usual_s = usual([row["median_s"] for row in rows if row["median_s"] is not None])
    for row in rows:
        shown = row["median_s"] if row["median_s"] is not None else row["at_least_s"]
        row["slowness"] = None if shown is None or not usual_s else shown / usual_s
    mark_slow_in(rows, usual_s, header)
    rows.sort(key=lambda row: (row["slowness"] is None, -(row["slowness"] or 0.0), row["worker"]))
    return rows


def _row(worker: int, pace: Pace, work: WorkerTotals) -> dict[str, Any]:
    half_s, most_s = pace.durations.quantiles((0.5, 0.9))
    return {
        "worker": worker,
        "median_s": half_s,
        "mean_s": pace.durations.mean_s,
        "p90_s": most_s,
        "at_least_s": pace.durations.longest_s if half_s is None else None,  # half of its tickets took longer than this
        "parts_s": pace.means_s(),
        "arrived": work.arrived,
        "applied": work.applied,
        "dropped": work.dropped,
        "lost": work.lost,
        "compute_s": work.compute_s,
        "wasted_s": work.wasted_s,
        "idle_s": work.idle_s,
        "live_s": work.live_s,
    }


def mark_slow_in(rows: list[dict[str, Any]], usual_s: float | None, header: dict[str, Any]) -> None:
    """Set `slow_in` of each slow worker to the part that exceeds the usual worker's most."""
    engine = header.get("engine") or {}
    only_computes = engine.get("name") == "simulated" and engine.get("network") is None
    known = [_with_waiting(row) for row in rows if row["parts_s"] is not None]
    usual_parts_s = {name: median(parts[name] for parts in known) for name in known[0]} if known else {}
    for row in rows:
        row["slow_in"] = None
        if row["slowness"] is None or row["slowness"] < SLOW or usual_s is None:
            continue
        if row["parts_s"] is None:
            row["slow_in"] = "compute" if only_computes else None
            continue
        beyond_s = {name: part_s - usual_parts_s[name] for name, part_s in _with_waiting(row).items()}
        worst = max(beyond_s, key=lambda name: beyond_s[name])
        if beyond_s[worst] > _NOTICEABLE * usual_s:
            row["slow_in"] = worst


def _with_waiting(row: dict[str, Any]) -> dict[str, float]:
    parts_s: dict[str, float] = row["parts_s"]
    return {**parts_s, "waiting": max(0.0, row["mean_s"] - sum(parts_s.values()))}
