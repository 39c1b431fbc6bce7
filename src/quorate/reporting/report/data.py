"""The data of a report as one dictionary of JSON values, which the page, the figures and the tables draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import BadInput
from quorate.metrics import Curve
from quorate.policies import FullSync
from quorate.reporting.comparison import (
    VIRTUAL,
    ComparedRun,
    finite,
    make_rows,
    measure_of,
    policy_label,
    seconds_are,
    subject,
)
from quorate.reporting.figures import COLOURS
from quorate.reporting.findings import GOOD_ENDS, Finding, finding, sentence, to_go_on, who_is_slow, with_advice
from quorate.reporting.report.slowness import IN_WORDS, MOST_SHOWN, SLOW, usual
from quorate.reporting.report.trace_pass import MEASURED, Gathered
from quorate.trace import TRACE_FILE, works_ahead

if TYPE_CHECKING:
    from quorate.stopping import Until


def run_folder(path: Path) -> Path:
    """The folder of a run, given that folder or its trace."""
    return path.parent if path.name == TRACE_FILE else path


def labels(headers: Sequence[dict[str, Any]], paths: Sequence[Path]) -> list[str]:
    """A unique label per run: the policy, with the folder if needed, or else with the whole path."""
    plain = [header.get("label") or policy_label(header["policy"], header["workers"]) for header in headers]
    folders = [run_folder(path) for path in paths]
    short = [f"{label} ({folder.resolve().name})" for label, folder in zip(plain, folders, strict=True)]
    long = [f"{label} ({path})" for label, path in zip(plain, paths, strict=True)]
    return [
        label if plain.count(label) == 1 else named if short.count(named) == 1 else full
        for label, named, full in zip(plain, short, long, strict=True)
    ]


def colours(headers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The colour of each run: that of its policy, a free one for a second run, and dashes if none is free."""
    wanted = [COLOURS.get(header["policy"]["name"]) for header in headers]
    palette = list(dict.fromkeys(COLOURS.values()))
    taken: set[str] = set()
    looks: list[dict[str, Any]] = []
    for index, own in enumerate(wanted):
        if own is not None and own not in taken:
            colour, dashed = own, False
        else:
            reserved = taken | {later for later in wanted[index + 1 :] if later is not None}
            free = [one for one in palette if one not in reserved] or [one for one in palette if one not in taken]
            colour, dashed = (free[0], False) if free else (palette[index % len(palette)], True)
        taken.add(colour)
        looks.append({"colour": colour, "dashed": dashed})
    return looks


_MOST_WORKERS = 256  # with more, the planner takes too long for a report


def plan_for(runs: Sequence[Gathered]) -> tuple[dict[str, Any] | None, str | None]:
    """A plan from the most informative run (one that waited for all workers, if any), or the reason why not."""
    why: str | None = None
    for run in sorted(runs, key=lambda run: run.header["policy"]["name"] != FullSync.name):
        made, why_not = plan_of(run.sources, run.header["workers"])
        if made is not None:
            return {**made, "run": runs.index(run)}, None
        why = why or why_not
    return None, why


def plan_of(sources: Sequence[Path], workers: int) -> tuple[dict[str, Any] | None, str | None]:
    """A plan from a run or from step times, or the reason why there is none."""
    from quorate.planning import plan

    if workers > _MOST_WORKERS:
        return None, f"for {workers} workers the planner takes a while; ask it with quorate plan RUN"
    try:
        return plan(*sources).as_dict(), None
    except BadInput as error:
        return None, str(error)


_MOST_STALENESS_BARS = 48


def report_data(
    runs: Sequence[Gathered],
    target: Until | None = None,
    plan: dict[str, Any] | None = None,
    no_plan: str | None = None,
) -> dict[str, Any]:
    """The whole report. `plan` is the output of the planner; `no_plan` is the reason if it gave none."""
    if target is not None:
        _check_measured(runs, target)
    headers = [run.header for run in runs]
    names, looks = labels(headers, [run.path for run in runs]), colours(headers)
    outcomes = [
        ComparedRun(
            name=str(run.path),
            label=name,
            metrics=run.metrics,
            broke_off=None if run.gatherer.end is not None else "broke off",
        )
        for run, name in zip(runs, names, strict=True)
    ]
    stale = _staleness([run.metrics.staleness for run in runs])
    kinds = {seconds_are(header) for header in headers}
    section = planner_section(plan)
    findings = [_findings(run) for run in runs]
    if plan is not None and section is not None:
        place = section["run"] or 0
        findings[place] = with_advice(findings[place], plan, headers[place])
    elif no_plan is not None and any(run.metrics.updates for run in runs):
        findings[0].append(finding("no plan", f"The planner says: {no_plan}."))
    notes = [sentence(note) for run in runs for note in run.notes if section is None]  # a plan repeats them
    if len(kinds) > 1:
        notes.append("Some of these runs have real seconds and some virtual ones; their times are not comparable.")
    if len({header["task"] for header in headers}) > 1:
        notes.append("These runs do not all train the same task; compare their times, not what they learned.")
    data: dict[str, Any] = finite(
        {
            "title": names[0] if len(runs) == 1 else f"{len(runs)} runs",
            "quorate": headers[0].get("quorate"),
            "slow": SLOW,
            "seconds": kinds.pop() if len(kinds) == 1 else "mixed",
            "notes": notes,
            "target": None if target is None else target.text(),
            "measure": measure_of(outcomes, target),
            "comparison": [asdict(row) for row in make_rows(outcomes, target)],
            "runs": [
                {"label": name, **look, **_run(run), "staleness": bars, "findings": found}
                for run, name, look, bars, found in zip(runs, names, looks, stale, findings, strict=True)
            ],
            "plan": section,
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
    """The data for `--json`: without the arrays that are packed for the page."""
    packed = ("outline", "stretches")
    runs = [
        {**run, "heat": None, "timeline": {key: value for key, value in run["timeline"].items() if key not in packed}}
        for run in data["runs"]
    ]
    return {**data, "runs": runs}


def planner_section(plan: dict[str, Any] | None) -> dict[str, Any] | None:
    """The planner's curve over b and its recommendation, from the output of `quorate plan --json`."""
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
        "run": plan.get("run"),  # index of the run that the plan is made from
        "changes": list(choice.get("changes") or ()),
        "notes": [text for text in (plan.get("updates_from"), *(plan.get("notes") or ())) if text],
    }


_UPDATE_SECONDS = ("mean", "low", "high", "median", "p99")
_RECOMMENDATION = ("policy", "quorum", "backups", "seconds_per_update", "time", "speedup", "is_kept", "reason")


# ---------------------------------------------------------------- one run


def _findings(run: Gathered) -> list[Finding]:
    """The findings at the top of the page."""
    gatherer, metrics = run.gatherer, run.metrics
    found: list[Finding] = []
    if gatherer.end not in GOOD_ENDS:
        how = "broke off" if gatherer.end is None else f"was ended early: {gatherer.end}"
        command = to_go_on(run.path, run.header)
        more = "" if command is None else " To go on from its last checkpoint:"
        found.append(finding("stopped", f"The run {how}, after {metrics.updates:,} updates.{more}", command))
    sources = [run_folder(path) for path in run.sources]
    found += who_is_slow(run.rows, gatherer.arrivals, metrics.workers, run_s=metrics.seconds or None, sources=sources)
    lost = [worker for worker, work in metrics.workers.items() if work.lost]
    if lost:
        who = f"Worker {lost[0]} was" if len(lost) == 1 else f"{len(lost)} workers were"
        again = "1 ticket was" if metrics.lost_tickets == 1 else f"{metrics.lost_tickets:,} tickets were"
        found.append(finding("lost", f"{who} lost; {again} computed again.", None, lost))
    return found


def _run(run: Gathered) -> dict[str, Any]:
    gatherer, metrics, header = run.gatherer, run.metrics, run.header
    rows, measured = run.rows, header["engine"]["name"] == MEASURED
    loss = _columns(metrics.loss)
    measures = {name: _columns(curve) for name, curve in gatherer.measures.items()}
    arrivals = gatherer.arrivals.data()
    choices = gatherer.choices
    return {
        "name": str(run.path),
        "policy": header["policy"],
        "engine": header["engine"],
        "task": header["task"],
        "subject": subject(header),
        "workers": header.get("processes", header["workers"]),
        "seed": header["seed"],
        "batch_size": header.get("batch_size"),
        "seconds_are": seconds_are(header),
        "end": gatherer.end,
        "left_out": run.left_out,
        "summary": metrics.summary(),
        "samples_per_s": metrics.samples_applied / metrics.seconds if metrics.seconds > 0 else None,
        "update_deciles_s": [metrics.update_seconds.quantile(level) for level in (0.1, 0.5, 0.9, 0.99)],
        "loss": loss,
        "measures": {name: curve for name, curve in measures.items() if curve is not None},
        "arrivals": arrivals,
        "worker_rows": rows[:MOST_SHOWN],
        "worker_rows_left_out": max(0, len(rows) - MOST_SHOWN),
        "has_parts": any(row["parts_s"] is not None for row in rows),
        "part_words": {**IN_WORDS, "transfer": "all-reduce"} if works_ahead(header) else IN_WORDS,
        "measured": measured,
        "steps_are": "step" if measured else "update",
        "tickets_are": "step" if measured else "ticket",
        "first_step": header.get("first_step", 0),
        "has_all_reduce": header.get("has_all_reduce"),
        "heat": gatherer.heat.data(usual([row["median_s"] for row in rows if row["median_s"] is not None])),
        "timeline": gatherer.timeline.data(metrics.seconds),
        "choices": {"count": choices.count, "changes": choices.kept} if choices.count else None,
        "absent": _absent(run, loss is not None or bool(measures), arrivals is not None),
    }


def _columns(curve: Curve) -> dict[str, list[Any]] | None:
    if not curve.points:
        return None
    times, versions, samples, values = zip(*curve.points, strict=True)
    return {"time": list(times), "updates": list(versions), "samples": list(samples), "value": list(values)}


def _staleness(runs: Sequence[dict[int, int]]) -> list[list[dict[str, Any]]]:
    """Histogram per run, with common bars from staleness `least` to `most`; the last bar may be open-ended."""
    far = max(map(_nearly_all, runs))
    width = far // _MOST_STALENESS_BARS + 1
    last = far // width
    is_open = any(behind >= (last + 1) * width for counts in runs for behind in counts)
    ends = [(index + 1) * width - 1 for index in range(last)] + [None if is_open else (last + 1) * width - 1]
    histograms = []
    for counts in runs:
        bars = [0] * (last + 1)
        for behind, count in counts.items():
            bars[min(last, behind // width)] += count
        histograms.append(
            [
                {"least": index * width, "most": most, "tickets": count}
                for index, (most, count) in enumerate(zip(ends, bars, strict=True))
            ]
        )
    return histograms


def _nearly_all(counts: dict[int, int]) -> int:
    """The 98 % quantile of staleness, so that a few outliers do not compress the histogram."""
    left = 0.98 * sum(counts.values())
    for behind in sorted(counts):
        left -= counts[behind]
        if left <= 0:
            return behind
    return 0


def _absent(run: Gathered, learned: bool, has_rounds: bool) -> dict[str, str]:
    """Missing parts of the report, with the reason for each."""
    header, metrics = run.header, run.metrics
    why: dict[str, str] = {}
    if not metrics.updates:
        return {"updates": "the trace holds no update, so there is little to show"}
    if not learned:
        why["learning"] = (
            "the script recorded neither loss nor measures; model.record(loss=…) does"
            if works_ahead(header)
            else "gradients were not computed, so there is neither loss nor accuracy"
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
            else "the table has no columns of phases, as quorate.measure writes them"
            if header["engine"]["name"] == MEASURED
            else "the trace does not say where the seconds of a ticket went"
        )
    return why
