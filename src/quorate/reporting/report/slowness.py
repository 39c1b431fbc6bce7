"""Who is slow, and in what: seconds of every worker's tickets, and the parts they are made of."""

from __future__ import annotations

from statistics import median
from typing import Any

from quorate.events import Parts
from quorate.metrics import Work
from quorate.reporting.report.durations import Durations

PARTS = ("data", "compute", "transfer")
MOST_SHOWN = 500
_SLOW = 1.2  # times the usual, from which on a worker is called slow
_NOTICEABLE = 0.05  # of the usual ticket: what a part must cost beyond the usual to be named


class Pace:
    """The seconds of one worker's tickets."""

    def __init__(self) -> None:
        self.durations = Durations()
        self.parts_s = [0.0, 0.0, 0.0]
        self.with_parts = 0

    def arrived(self, seconds: float, parts: Parts | None) -> None:
        self.durations.add(seconds)
        if parts is not None:
            self.with_parts += 1
            for index, part_s in enumerate(parts):
                self.parts_s[index] += part_s

    def means_s(self) -> list[float] | None:
        return [total / self.with_parts for total in self.parts_s] if self.with_parts else None


def worker_rows(paces: dict[int, Pace], works: dict[int, Work]) -> list[dict[str, Any]]:
    """One row a worker, slowest first. Slowness is its median ticket against that of the usual worker."""
    rows = [_row(worker, paces.get(worker) or Pace(), work) for worker, work in works.items()]
    medians = [row["median_s"] for row in rows if row["median_s"] is not None]
    usual_s = median(medians) if medians else None
    usual_parts_s = [
        median(values) if values else None
        for values in ([row["parts_s"][name] for row in rows if row["parts_s"] is not None] for name in PARTS)
    ]
    for row in rows:
        shown = row["median_s"] if row["median_s"] is not None else row["at_least_s"]
        row["slowness"] = None if shown is None or not usual_s else shown / usual_s
        row["slow_in"] = _slow_in(row, usual_s, usual_parts_s)
    rows.sort(key=lambda row: (row["slowness"] is None, -(row["slowness"] or 0.0), row["worker"]))
    return rows


def _row(worker: int, pace: Pace, work: Work) -> dict[str, Any]:
    half_s, most_s = pace.durations.quantiles((0.5, 0.9))
    means_s = pace.means_s()
    return {
        "worker": worker,
        "median_s": half_s,
        "p90_s": most_s,
        "at_least_s": pace.durations.longest_s if half_s is None else None,  # half of its tickets took longer than this
        "parts_s": None if means_s is None else dict(zip(PARTS, means_s, strict=True)),
        "arrived": work.arrived,
        "applied": work.applied,
        "dropped": work.dropped,
        "lost": work.lost,
        "compute_s": work.compute_s,
        "wasted_s": work.wasted_s,
        "idle_s": work.idle_s,
        "live_s": work.live_s,
    }


def _slow_in(row: dict[str, Any], usual_s: float | None, usual_parts_s: list[float | None]) -> str | None:
    """The part that costs a slow worker most beyond what it costs the usual one."""
    if row["slowness"] is None or row["slowness"] < _SLOW or row["parts_s"] is None or usual_s is None:
        return None
    beyond_s = {
        name: row["parts_s"][name] - usual
        for name, usual in zip(PARTS, usual_parts_s, strict=True)
        if usual is not None
    }
    worst = max(beyond_s, key=lambda name: beyond_s[name])
    return worst if beyond_s[worst] > _NOTICEABLE * usual_s else None
