"""Every figure of a report as a table, for CSV files."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Table(NamedTuple):
    """The numbers of one figure."""

    name: str  # of its files
    title: str
    columns: tuple[str, ...]
    rows: Iterable[tuple[Any, ...]]


def tables(data: dict[str, Any]) -> Iterator[Table]:
    """One table per figure; figures without data are left out."""
    runs = data["runs"]
    taken: list[str] = []
    for name in dict.fromkeys(name for run in runs for name in run["measures"]):
        curves = [(run["label"], run["measures"][name]) for run in runs if name in run["measures"]]
        taken.append(slug(name).lower())
        again = f"-{taken.count(taken[-1])}" if taken.count(taken[-1]) > 1 else ""  # "a/b" and "a:b" are both a-b
        yield _curves(f"measure-{slug(name)}{again}", name, curves)
    losses = [(run["label"], run["loss"]) for run in runs if run["loss"] is not None]
    if losses:
        yield _curves("loss", "training loss", losses)
    timed = [run for run in runs if run["arrivals"] is not None]
    if timed:
        yield Table("arrivals-cdf", "time to the k-th gradient", ("run", "k", "seconds", "share"), _cdf(timed))
        means = ("run", "k", "mean_s", "rounds")
        yield Table("arrivals-mean", "mean time to the k-th gradient", means, _means(timed))
    kinds = runs[0]["timeline"]["outline"]["kinds"]
    shares = ("run", "first_worker", "from_s", "to_s", *kinds, "waiting")
    yield Table("timeline", "what the workers did: shares of their time", shares, _timeline(runs))
    yield Table("workers", "the workers, slowest first", ("run", *_WORKER_COLUMNS), _workers(runs))
    if any(run["summary"]["staleness"]["max"] for run in runs):
        bars = ((run["label"], bar["least"], bar["most"], bar["tickets"]) for run in runs for bar in run["staleness"])
        yield Table("staleness", "applied gradients by staleness", ("run", "least", "most", "tickets"), bars)
    if any(run["summary"]["bytes"]["sent"] for run in runs):
        sizes = ((run["label"], *(run["summary"]["bytes"][name] for name in _BYTES)) for run in runs)
        yield Table("bytes", "bytes sent", ("run", *(f"{name}_bytes" for name in _BYTES)), sizes)
    if any(run["choices"] for run in runs):
        names = ("time", "version", "quorum", "reason")
        changes = (
            (run["label"], *(change[name] for name in names))
            for run in runs
            if run["choices"]
            for change in run["choices"]["changes"]
        )
        yield Table("choices", "the quorum that was chosen", ("run", "time_s", *names[1:]), changes)
    plan = data["plan"]
    if plan is not None and not (plan["choice"] or {}).get("is_kept"):  # kept: no other split can be judged
        splits = ("backups", "quorum", "mean", "low", "high", "median", "p99", "updates", "time", "wasted", "bytes")
        yield Table("plan", "the planner's curve", splits, zip(*(plan[name] for name in splits), strict=True))


_BYTES = ("sent", "used", "wasted")
_PART_COLUMNS = {"data": "data_s", "compute": "compute_part_s", "transfer": "transfer_s"}
_WORKER_COLUMNS = (
    *("worker", "slowness", "median_s", "at_least_s", "p90_s", "data_s", "compute_part_s", "transfer_s", "slow_in"),
    *("arrived", "applied", "dropped", "lost", "compute_s", "wasted_s", "idle_s", "live_s"),
)


def slug(name: str) -> str:
    """A file name that is valid on any file system and cannot leave its folder."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60] or "unnamed"


def shares_of(timeline: dict[str, Any]) -> bytes:
    """The packed outline: kind by kind, row by row, bin by bin, in 255ths."""
    return base64.b64decode(timeline["outline"]["shares"])


def _curves(name: str, title: str, curves: list[tuple[str, dict[str, list[Any]]]]) -> Table:
    columns = ("time", "updates", "samples", "value")
    rows = ((label, *point) for label, curve in curves for point in zip(*(curve[key] for key in columns), strict=True))
    return Table(name, title, ("run", "time_s", *columns[1:]), rows)


def _cdf(runs: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        for chosen in run["arrivals"]["chosen"]:
            for seconds, share in zip(chosen["seconds"], chosen["share"], strict=True):
                yield run["label"], chosen["k"], seconds, share


def _means(runs: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        arrivals = run["arrivals"]
        for place, (mean, count) in enumerate(zip(arrivals["means"], arrivals["counts"], strict=True), start=1):
            yield run["label"], place, mean, count


def _timeline(runs: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        timeline, outline = run["timeline"], run["timeline"]["outline"]
        packed, bins, rows = shares_of(timeline), outline["bins"], timeline["rows"]
        for row in range(rows):
            for index in range(bins):
                parts = [packed[(kind * rows + row) * bins + index] / 255 for kind in range(len(outline["kinds"]))]
                times = index * outline["width_s"], min((index + 1) * outline["width_s"], timeline["seconds"])
                rest = max(0.0, 1 - sum(parts))
                shown = [round(part, 4) for part in (*parts, rest)]
                yield run["label"], row * timeline["workers_per_row"], *times, *shown


def _workers(runs: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        for row in run["worker_rows"]:
            parts = row["parts_s"] or {}
            named = {_PART_COLUMNS.get(part, part): part_s for part, part_s in parts.items()} | row
            yield run["label"], *(named.get(name) for name in _WORKER_COLUMNS)
