"""Comparison of several runs of one task: one row per run, with speed-ups over the first run."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.trace import works_ahead

if TYPE_CHECKING:
    from quorate.metrics import Metrics
    from quorate.stopping import Until


def finite(value: Any) -> Any:
    """The same value with null in place of NaN and Inf, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def command_to_go_on(run: Path, again: str = "") -> str:
    """The command that resumes a run. again: options that are not recorded, each with a leading space."""
    return f"quorate train --resume {shlex.quote(str(run))}{again}"


REAL, VIRTUAL = "real", "virtual"


def seconds_are(header: dict[str, Any]) -> str:
    """Whether the seconds of a run are wall-clock time (REAL) or simulated time (VIRTUAL)."""
    return VIRTUAL if header["engine"]["name"] == "simulated" else REAL


def subject(header: dict[str, Any]) -> str:
    """The task of a run, as a phrase after the name of the policy."""
    if header.get("task"):
        return f"on {header['task']}"
    return "in a script of its own" if works_ahead(header) else "without gradients"


def policy_label(policy: dict[str, Any], workers: Any) -> str:
    """A policy with its numbers, for tables and legends; `policy` is the entry of a trace's header."""
    name = policy.get("name", "unknown policy")
    if policy.get("quorum") is not None and policy.get("backups") is not None:
        return f"{name} {policy['quorum']}+{policy['backups']}"
    return f"{name} {workers}" if policy.get("quorum") is None else f"{name} {policy['quorum']}/{workers}"


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a comparison."""

    name: str  # key, and name of the folder
    label: str  # in tables and legends
    metrics: Metrics
    broke_off: str | None = None  # error message of a run that broke off
    kth_arrivals: list[list[float]] = field(default_factory=list)  # [k-1]: seconds to the k-th arrival, per round

    @property
    def policy(self) -> str:
        return str(self.metrics.header["policy"]["name"])


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one run in a comparison."""

    name: str
    label: str
    time_to_target_s: float | None
    speed_up: float | None  # over the first run: by time to the target, or by samples per second if there is no target
    measure: str | None  # the compared measure; None: the training loss
    final: float | None  # of the last version
    best: float | None  # of all evaluations
    updates: int
    seconds: float
    samples_per_s: float | None
    staleness_mean: float
    staleness_max: int
    dropped_share: float  # of ended tickets
    wasted_share: float  # of the workers' time: spent on gradients that were not applied
    waiting_share: float  # of the workers' time: spent without work
    bytes_sent: int
    bytes_used_share: float | None
    broke_off: str | None


def time_to(metrics: Metrics, target: Until) -> float | None:
    """Seconds to the first evaluation that meets the target; None if none does."""
    return next((one.time for one in metrics.evaluations if target.holds(one.measures)), None)


def measure_of(outcomes: Sequence[ComparedRun], target: Until | None) -> str | None:
    """The compared measure: that of the target, else the first of the task."""
    if target is not None:
        return target.name
    for outcome in outcomes:
        for evaluation in outcome.metrics.evaluations:
            return next(iter(evaluation.measures), None)
    return None


def make_rows(outcomes: Sequence[ComparedRun], target: Until | None) -> list[Row]:
    """One row per run, in the order of the runs."""
    measure = measure_of(outcomes, target)
    rows: list[Row] = []
    first: tuple[float | None, float | None] | None = None
    for outcome in outcomes:
        metrics = outcome.metrics
        summary = metrics.summary()
        reached = None if target is None else time_to(metrics, target)
        pace = metrics.samples_applied / metrics.seconds if metrics.seconds > 0 else None
        first = (reached, pace) if first is None else first
        if target is None:
            speed_up = None if pace is None or not first[1] else pace / first[1]
        else:
            speed_up = None if not reached or first[0] is None else first[0] / reached
        values = [
            one.measures[measure] for one in metrics.evaluations if measure is not None and measure in one.measures
        ]
        smaller = target is not None and target.relation == "<="
        work = summary["worker_seconds"]
        worker_s = work["compute"] + work["idle"] or 1.0
        rows.append(
            Row(
                name=outcome.name,
                label=outcome.label,
                time_to_target_s=reached,
                speed_up=speed_up,
                measure=measure,
                final=values[-1] if values else metrics.last_loss if measure is None else None,
                best=(min(values) if smaller else max(values)) if values else None,
                updates=metrics.updates,
                seconds=metrics.seconds,
                samples_per_s=pace,
                staleness_mean=metrics.staleness_mean(),
                staleness_max=max(metrics.staleness, default=0),
                dropped_share=metrics.drop_rate(),
                wasted_share=work["wasted"] / worker_s,
                waiting_share=work["idle"] / worker_s,
                bytes_sent=metrics.bytes_sent,
                bytes_used_share=metrics.bytes_used / metrics.bytes_sent if metrics.bytes_sent else None,
                broke_off=outcome.broke_off,
            )
        )
    return rows


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV, with numbers in full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = list(Row.__dataclass_fields__)
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if getattr(row, name) is None else getattr(row, name) for name in names])
    return file.getvalue()


def summary_of(outcomes: Sequence[ComparedRun], target: Until | None) -> dict[str, Any]:
    """The comparison as JSON values."""
    runs: dict[str, Any] = {}
    for outcome in outcomes:
        runs[outcome.name] = {
            **outcome.metrics.summary(),
            "time_to_target": None if target is None else time_to(outcome.metrics, target),
        }
        if outcome.broke_off is not None:
            runs[outcome.name]["broke_off"] = outcome.broke_off
    return {
        "engine": outcomes[0].metrics.header["engine"]["name"],
        "target": None if target is None else target.text(),
        "runs": runs,
    }
