"""Several runs of one task, side by side: one row a run, all against the first."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorate.conditions import Until
    from quorate.metrics import Metrics


REAL, VIRTUAL = "real", "virtual"


def seconds_are(header: dict[str, Any]) -> str:
    """Whether a run's seconds are those of a clock on the wall or simulated ones."""
    return VIRTUAL if header["engine"]["name"] == "simulated" else REAL


def policy_label(policy: dict[str, Any], workers: Any) -> str:
    """A policy with its numbers, as a table or a legend shows it; `policy` is what a trace's header says of it."""
    name = policy.get("name", "unknown policy")
    if policy.get("quorum") is not None and policy.get("backups") is not None:
        return f"{name} {policy['quorum']}+{policy['backups']}"
    for option in ("gradients", "k", "quorum"):
        if policy.get(option) is not None:
            return f"{name} {policy[option]}/{workers}"
    return f"{name} {workers}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of a comparison."""

    name: str  # its key, and the name of its folder
    label: str  # how a table or a legend calls it
    metrics: Metrics
    broke_off: str | None = None  # why it came to no end of its own
    kth_arrivals: list[list[float]] = field(default_factory=list)  # [k-1]: seconds to the k-th arrival, per round

    @property
    def policy(self) -> str:
        return str(self.metrics.header["policy"]["name"])


@dataclass(frozen=True, kw_only=True)
class Row:
    """The numbers of one run that a comparison is about."""

    name: str
    label: str
    time_to_target_s: float | None
    speed_up: float | None  # against the first run: in time to the target, or without one in samples per second
    measure: str | None  # the one that is compared (None: the training loss)
    final: float | None  # of the last version
    best: float | None  # of the best evaluation on the way
    updates: int
    seconds: float
    samples_per_s: float | None
    staleness_mean: float
    staleness_max: int
    dropped_share: float  # of ended tickets
    wasted_share: float  # of the workers' time: spent on what was not applied
    waiting_share: float  # of the workers' time: spent without work
    bytes_sent: int
    bytes_used_share: float | None
    broke_off: str | None


def time_to(metrics: Metrics, target: Until) -> float | None:
    """Seconds to the first evaluation for which the target holds; None if it never does."""
    for evaluation in metrics.evaluations:
        if target.holds(evaluation.measures):
            return evaluation.time
    return None


def measure_of(outcomes: Sequence[Outcome], target: Until | None) -> str | None:
    """The measure that the comparison is about: the target's, else the task's first."""
    if target is not None:
        return target.name
    for outcome in outcomes:
        for evaluation in outcome.metrics.evaluations:
            return next(iter(evaluation.measures), None)
    return None


def make_rows(outcomes: Sequence[Outcome], target: Until | None) -> list[Row]:
    """One row a run, in their order."""
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
    """The rows as a CSV file, numbers in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = list(Row.__dataclass_fields__)
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if getattr(row, name) is None else getattr(row, name) for name in names])
    return file.getvalue()


def summary_of(outcomes: Sequence[Outcome], target: Until | None) -> dict[str, Any]:
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
