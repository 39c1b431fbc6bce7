"""Everything a report shows, as one dict of plain JSON values. The page, the figures and the tables draw from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quorate.errors import BadInput
from quorate.metrics import Curve
from quorate.reporting.comparison import VIRTUAL, Outcome, make_rows, measure_of, seconds_are
from quorate.reporting.plain import finite
from quorate.reporting.report.gathering import Gathered
from quorate.reporting.report.looks import colours, labels
from quorate.reporting.report.slowness import MOST_SHOWN, worker_rows

if TYPE_CHECKING:
    from quorate.conditions import Until

_MOST_STALENESS_BARS = 48


def report_data(
    runs: Sequence[Gathered],
    target: Until | None = None,
    plan: dict[str, Any] | None = None,
    no_plan: str | None = None,
) -> dict[str, Any]:
    """The whole report. `plan` is what the planner says, where it was asked; `no_plan` why it could say nothing."""
    if target is not None:
        _check_measured(runs, target)
    headers = [run.header for run in runs]
    names, looks = labels(headers, [run.path for run in runs]), colours(headers)
    outcomes = [
        Outcome(name=str(run.path), label=name, metrics=run.metrics, broke_off=_broke_off(run))
        for run, name in zip(runs, names, strict=True)
    ]
    stale = _staleness([run.metrics.staleness for run in runs])
    kinds = {seconds_are(header) for header in headers}
    notes = []
    if len(kinds) > 1:
        notes.append("Some of these runs have real seconds and some virtual ones; their times are not comparable.")
    if len({header["task"] for header in headers}) > 1:
        notes.append("These runs do not all train the same task; compare their times, not what they learned.")
    data: dict[str, Any] = finite(
        {
            "title": names[0] if len(runs) == 1 else f"{len(runs)} runs",
            "quorate": headers[0].get("quorate"),
            "seconds": kinds.pop() if len(kinds) == 1 else "mixed",
            "notes": notes,
            "target": None if target is None else target.text(),
            "measure": measure_of(outcomes, target),
            "comparison": [asdict(row) for row in make_rows(outcomes, target)],
            "runs": [
                {"label": name, **look, **_run(run), "staleness": bars}
                for run, name, look, bars in zip(runs, names, looks, stale, strict=True)
            ],
            "plan": planner_section(plan),
            "no_plan": no_plan,
        }
    )
    return data


def _check_measured(runs: Sequence[Gathered], target: Until) -> None:
    known = sorted({name for run in runs for name in run.gatherer.measures})
    if target.name not in known:
        remedy = f"choose one of: {', '.join(known)}" if known else "leave out --target"
        raise BadInput(f"target is {target.text()!r}, but no run measures {target.name!r}; {remedy}")


def without_drawings(data: dict[str, Any]) -> dict[str, Any]:
    """The data for programs: what is packed for the page alone is left out."""
    packed = ("outline", "stretches")
    runs = [
        {**run, "timeline": {key: value for key, value in run["timeline"].items() if key not in packed}}
        for run in data["runs"]
    ]
    return {**data, "runs": runs}


def planner_section(plan: dict[str, Any] | None) -> dict[str, Any] | None:
    """The planner's curve over b with its choice, from what `quorate plan --json` gives; None without a plan."""
    if plan is None or not plan.get("splits"):
        return None
    splits = sorted(plan["splits"], key=lambda split: int(split["backups"]))
    choice = plan.get("recommendation") or {}
    return {
        "machines": plan.get("machines"),
        "backups": [split["backups"] for split in splits],
        "quorum": [split["quorum"] for split in splits],
        **{name: [split["update_seconds"].get(name) for split in splits] for name in _UPDATE_SECONDS},
        **{name: [split.get(name) for split in splits] for name in ("updates", "time", "wasted", "bytes")},
        "choice": {name: choice.get(name) for name in _RECOMMENDATION} if choice else None,
        "run": plan.get("run"),  # the place of the run it is made from
        "changes": list(choice.get("changes") or ()),
        "notes": [text for text in (plan.get("updates_from"), *(plan.get("notes") or ())) if text],
    }


_UPDATE_SECONDS = ("mean", "low", "high", "median", "p99")
_RECOMMENDATION = ("policy", "quorum", "backups", "seconds_per_update", "time", "speedup", "reason")


# ---------------------------------------------------------------- one run


def _broke_off(run: Gathered) -> str | None:
    return None if run.gatherer.end is not None else "broke off"


def _run(run: Gathered) -> dict[str, Any]:
    gatherer, metrics, header = run.gatherer, run.metrics, run.header
    rows = worker_rows(gatherer.paces, metrics.workers)
    loss = _columns(metrics.loss)
    measures = {name: _columns(curve) for name, curve in gatherer.measures.items()}
    arrivals = gatherer.arrivals.data()
    summary = metrics.summary()
    return {
        "name": str(run.path),
        "policy": header["policy"],
        "engine": header["engine"],
        "task": header["task"],
        "workers": header["workers"],
        "seed": header["seed"],
        "batch_size": header.get("batch_size"),
        "seconds_are": seconds_are(header),
        "end": gatherer.end,
        "left_out": run.left_out,
        "summary": summary,
        "samples_per_s": metrics.samples_applied / metrics.seconds if metrics.seconds > 0 else None,
        "update_deciles_s": [metrics.update_seconds.quantile(level) for level in (0.1, 0.5, 0.9, 0.99)],
        "loss": loss,
        "measures": {name: curve for name, curve in measures.items() if curve is not None},
        "arrivals": arrivals,
        "worker_rows": rows[:MOST_SHOWN],
        "worker_rows_left_out": max(0, len(rows) - MOST_SHOWN),
        "has_parts": any(row["parts_s"] is not None for row in rows),
        "timeline": gatherer.timeline.data(metrics.seconds),
        "choices": _choices(run),
        "absent": _absent(run, loss is not None or bool(measures), arrivals is not None),
    }


def _columns(curve: Curve) -> dict[str, list[Any]] | None:
    if not curve.points:
        return None
    times, versions, samples, values = zip(*curve.points, strict=True)
    return {"time": list(times), "updates": list(versions), "samples": list(samples), "value": list(values)}


def _staleness(runs: Sequence[dict[int, int]]) -> list[list[dict[str, Any]]]:
    """Bars of one histogram a run, the same for all: staleness `least` to `most`; the last bar has no end."""
    far = max(map(_nearly_all, runs))
    width = far // _MOST_STALENESS_BARS + 1
    last = far // width
    every = []
    for counts in runs:
        bars = [0] * (last + 1)
        for behind, count in counts.items():
            bars[min(last, behind // width)] += count
        farther = any(behind >= (last + 1) * width for one in runs for behind in one)
        every.append(
            [
                {
                    "least": index * width,
                    "most": None if farther and index == last else (index + 1) * width - 1,
                    "tickets": count,
                }
                for index, count in enumerate(bars)
            ]
        )
    return every


def _nearly_all(counts: dict[int, int]) -> int:
    """The staleness that 98 % do not exceed: a few that are far out must not squeeze the others together."""
    left = 0.98 * sum(counts.values())
    for behind in sorted(counts):
        left -= counts[behind]
        if left <= 0:
            return behind
    return 0


def _choices(run: Gathered) -> dict[str, Any] | None:
    choices = run.gatherer.choices
    return {"count": choices.count, "changes": choices.kept} if choices.count else None


def _absent(run: Gathered, learned: bool, has_rounds: bool) -> dict[str, str]:
    """What a person would miss, and why it is not there."""
    header, metrics = run.header, run.metrics
    why: dict[str, str] = {}
    if not metrics.updates:
        return {"updates": "the trace holds no update, so there is little to show"}
    if not learned:
        why["learning"] = (
            "gradients were not computed, so there is neither loss nor accuracy"
            if header["task"] is None or metrics.last_loss is None
            else "nothing was measured"
        )
    elif not run.gatherer.measures:
        why["measures"] = "the task measures nothing, so only the training loss is shown"
    if not has_rounds:
        rounds = run.gatherer.arrivals
        why["arrivals"] = (
            "every round was the last of its epoch and took what was left"
            if rounds.short_rounds and not rounds.rounds
            else f"{header['policy']['name']} has no rounds whose gradients could be counted"
        )
    if not metrics.bytes_sent:
        why["bytes"] = "the size of the parameters is not known"
    if all(pace.with_parts == 0 for pace in run.gatherer.paces.values()):
        why["parts"] = (
            "a simulated run has parts only with a network (--network)"
            if seconds_are(header) == VIRTUAL
            else "the trace does not say where the seconds of a ticket went"
        )
    return why
