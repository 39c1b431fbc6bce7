"""Times of tickets by worker: when gradients arrive in a round, which workers are slow, and in which part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, median_low
from typing import Any

from quorate.events import Parts
from quorate.metrics import WorkerTotals, round_quorum
from quorate.reporting.rounds import KthMeans

_SHORTEST_S = 1e-9  # shorter durations count as this one


class Durations:
    """Histogram of durations in bins of equal ratio. A cancelled ticket counts as a lower bound (Kaplan-Meier).

    Otherwise a worker whose slow tickets are all cancelled would look fast.
    """

    def __init__(self, bins_per_e: int = 200) -> None:
        self.count = 0
        self.total_s = 0.0
        self._per_e = bins_per_e
        self._ended: dict[int, int] = {}
        self._cut: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        key = self._bin(seconds)
        self._ended[key] = self._ended.get(key, 0) + 1

    def add_cut(self, seconds: float) -> None:
        key = self._bin(seconds)
        self._cut[key] = self._cut.get(key, 0) + 1

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.count if self.count else None

    @property
    def longest_s(self) -> float | None:
        """The longest duration, cancelled tickets included."""
        keys = (*self._ended, *self._cut)
        return self._middle(max(keys)) if keys else None

    def quantiles(self, levels: Sequence[float]) -> list[float | None]:
        """Quantiles at ascending levels; None where too many tickets were cancelled."""
        found: list[float | None] = []
        at_risk, left = self.count + sum(self._cut.values()), 1.0
        for key in sorted(self._ended.keys() | self._cut.keys()):
            ended = self._ended.get(key, 0)
            if ended:
                left *= 1 - ended / at_risk
                while len(found) < len(levels) and left <= 1 - levels[len(found)] + 1e-12:
                    found.append(self._middle(key))
            at_risk -= ended + self._cut.get(key, 0)
        return found + [None] * (len(levels) - len(found))

    def _bin(self, seconds: float) -> int:
        return math.floor(math.log(max(seconds, _SHORTEST_S)) * self._per_e)

    def _middle(self, key: int) -> float:
        return math.exp((key + 0.5) / self._per_e)


_LEVELS = [0.001, *(step / 100 for step in range(1, 100)), 0.999, 1.0]
_ALL_UP_TO = 12  # workers; up to here, the distribution is kept for every k
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.97, 0.99)


def chosen_places(header: dict[str, Any]) -> list[int]:
    """The k whose distributions are kept: all for few workers, else the first, the last, the quorum and a sample."""
    workers = int(header["workers"])
    if workers <= _ALL_UP_TO:
        return list(range(1, workers + 1))
    quorum = round_quorum(header)
    wanted = {1, workers, *(round(share * workers) for share in _SHARES)}
    wanted |= set() if quorum is None else {quorum}
    return sorted(place for place in wanted if 1 <= place <= workers)


class Arrivals(KthMeans):
    """Seconds from a version to its k-th arrival: means for all k, distributions for the chosen k."""

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
        """JSON values; None if the run had no rounds."""
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
                    "k": k,
                    "count": times.count,
                    "mean": times.mean_s,
                    "seconds": times.quantiles(_LEVELS),
                    "share": _LEVELS,
                }
                for k, times in self._chosen.items()
                if times.count
            ],
        }


# ---------------------------------------------------------------- slow workers


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
