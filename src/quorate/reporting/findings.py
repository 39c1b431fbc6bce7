"""Findings at the top of the pages: slow workers, their cost, and the command that helps."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quorate.checkpoint import CheckpointFolder
from quorate.coordinator import ALL_HAVE_FINISHED, DATA_USED_UP, LIMIT_REACHED
from quorate.metrics import WorkerTotals
from quorate.number_format import seconds
from quorate.policies import BackupSync, FullSync
from quorate.reporting.comparison import command_to_go_on
from quorate.reporting.report.slowness import IN_WORDS, SLOW
from quorate.reporting.rounds import KthMeans, Waiting

_FEWEST_TICKETS = 3  # of a worker; fewer do not show whether it is always slow
_MOST_NAMED = 4  # workers in a sentence
_NOTICEABLE = 0.05  # share of the time above which a cost is reported
_LOOK_AT = {
    "data": "Look at its data loader and its disk",
    "transfer": "Look at its network link",
    **dict.fromkeys(("compute", "waiting", "forward", "backward", "optimizer"), "Look for other load on its machine"),
}

#: End reasons of a run that was neither stopped nor broken off.
GOOD_ENDS = (LIMIT_REACHED, DATA_USED_UP, ALL_HAVE_FINISHED)

Finding = dict[str, Any]  # kind, text, command (or None), workers that the text is about


def finding(kind: str, text: str, command: str | None = None, workers: Sequence[int] = ()) -> Finding:
    return {"kind": kind, "text": text, "command": command, "workers": list(workers)}


def who_is_slow(
    rows: Sequence[dict[str, Any]],
    rounds: KthMeans,
    works: dict[int, WorkerTotals],
    *,
    run_s: float | None,
    sources: Sequence[Path],
) -> list[Finding]:
    """Findings about workers that are always slow and their cost, or that no worker is slow.

    rows: dictionaries with worker, slowness, slow_in and median_s.
    run_s: seconds of the whole run; None if `rounds` holds the latest rounds only.
    sources: paths for `quorate plan`.
    """
    timed = [row for row in rows if row["slowness"] is not None and _ended(works[row["worker"]]) >= _FEWEST_TICKETS]
    slow = sorted((row for row in timed if row["slowness"] >= SLOW), key=lambda row: -row["slowness"])
    if len(timed) < 2:
        return []
    if not slow:
        return _no_slow_worker(timed, rounds)
    numbers = [int(row["worker"]) for row in slow]
    usual_s = min(row["median_s"] / row["slowness"] for row in timed if row["median_s"])
    cost, is_better_without = _cost(set(numbers), rounds, works, run_s)
    text = f"{_who(slow, usual_s)} {cost}"
    it, its = ("it", "its") if len(slow) == 1 else ("them", "their")
    places = {_LOOK_AT.get(row["slow_in"]) for row in slow}
    advice = [place.replace("its", its) for place in places if place is not None and len(places) == 1]
    advice += [f"leave {it} out"] if is_better_without else []
    if advice:
        text += f" {sentence(', or '.join(advice))}"
    without = "+".join(map(str, numbers))
    command = shlex.join(["quorate", "plan", *map(str, sources), "--what-if", f"without={without}"])
    return [finding("slow", text, command if sources else None, numbers)]


def _ended(work: WorkerTotals) -> int:
    return work.arrived + work.dropped - work.unused


def _no_slow_worker(timed: Sequence[dict[str, Any]], rounds: KthMeans) -> list[Finding]:
    slowest = max(timed, key=lambda row: row["slowness"])
    found = [
        finding(
            "even",
            f"No worker is slow: the slowest, worker {slowest['worker']}, takes ×{slowest['slowness']:.2f} "
            f"the time of the usual worker.",
        )
    ]
    last = [one.seconds[-1] - one.seconds[-2] for one in rounds.full]
    share = sum(last) / (sum(one.took_s for one in rounds.full) or 1.0)
    if share >= _NOTICEABLE:
        text = (
            f"A different worker comes last each time; waiting for it takes {seconds(sum(last) / len(last))} "
            f"an update, {share:.0%} of the time. A backup would save that, for one gradient less an update."
        )
        found.append(finding("chance", text))
    return found


def _who(slow: Sequence[dict[str, Any]], usual_s: float) -> str:
    """The slow workers, their slowness and the part in which they are slow."""
    if len(slow) == 1:
        row = slow[0]
        took, bound = (row["median_s"], "") if row["median_s"] is not None else (row["at_least_s"], "at least ")
        return (
            f"Worker {row['worker']} is {bound}×{row['slowness']:.1f} slow{_slow_part(row)}: {bound}{seconds(took)} "
            f"a gradient, the usual worker takes {seconds(usual_s)}."
        )
    named = [f"{row['worker']} (×{row['slowness']:.1f}{_slow_part(row)})" for row in slow[:_MOST_NAMED]]
    more = len(slow) - len(named)
    listed = f"{', '.join(named)} and {more} more" if more else f"{', '.join(named[:-1])} and {named[-1]}"
    return f"Workers {listed} are slow; the usual worker takes {seconds(usual_s)} a gradient."


def _slow_part(row: dict[str, Any]) -> str:
    return f" in {IN_WORDS.get(row['slow_in'], row['slow_in'])}" if row["slow_in"] else ""


def _cost(slow: set[int], rounds: KthMeans, works: dict[int, WorkerTotals], run_s: float | None) -> tuple[str, bool]:
    """The cost of slow workers in seconds and per cent, and whether the run is faster without them."""
    it, its = ("it", "its") if len(slow) == 1 else ("them", "their")
    waiting = rounds.waiting_for(slow)
    if waiting is not None:
        of_s, what = (run_s, "the run") if run_s else (waiting.took_s, f"the last {waiting.rounds:,} updates")
        without, faster = _without(waiting, slow, it)
        cost = f"Waiting for {it} costs {seconds(waiting.cost_s)}, {waiting.cost_s / of_s:.0%} of {what}. {without}"
        return cost, faster > 1
    mine = [works[worker] for worker in slow]
    applied, dropped = sum(one.applied for one in mine), sum(one.dropped for one in mine)
    wasted_s, mine_s = sum(one.wasted_s for one in mine), sum(one.compute_s for one in mine)
    if rounds.most is not None or wasted_s > _NOTICEABLE * mine_s:
        all_s = sum(one.compute_s for one in works.values())
        return (
            f"Updates do not wait for {it}: {dropped / max(1, dropped + applied):.0%} of {its} gradients came too late "
            f"and were dropped, {seconds(wasted_s)} of computing, {wasted_s / (all_s or 1.0):.0%} of all."
        ), dropped > applied
    others = sorted(one.applied for worker, one in works.items() if worker not in slow)
    missing = max(0, others[(len(others) - 1) // 2] * len(slow) - applied) if others else 0
    share = missing / max(1, missing + sum(one.applied for one in works.values()))
    lost = f"{seconds(share * run_s)}, {share:.0%} of the run" if run_s else f"{share:.0%} of the time"
    return f"At the usual pace {missing:,} more gradients would have come from {it}: that costs {lost}.", False


def _without(waiting: Waiting, slow: set[int], it: str) -> tuple[str, float]:
    update_s = waiting.took_s / waiting.rounds
    left_s = update_s - waiting.cost_s / waiting.rounds
    kept = waiting.gradients - len(slow)
    faster = update_s / left_s * kept / waiting.gradients if left_s > 0 else 1.0
    return (
        f"Without {it}, an update takes {seconds(left_s)} instead of {seconds(update_s)}, with {kept:.0f} of "
        f"{waiting.gradients:.0f} gradients: ×{faster:.2f} the samples per second."
    ), faster


def with_advice(found: list[Finding], plan: dict[str, Any], header: dict[str, Any]) -> list[Finding]:
    """Add the output of `quorate plan --json`: its cautions first, its recommendation with a command last."""
    choice = plan.get("recommendation") or {}
    if choice.get("is_kept"):  # workers shared cores, so their times do not show which of them is slow
        found = [one for one in found if one["kind"] != "slow"]
    found = [*(finding("caution", sentence(words)) for words in plan.get("cautions") or ()), *found]
    quorum, backups = choice.get("quorum"), choice.get("backups")
    if quorum is not None and backups is not None:
        command = command_for(header, quorum, backups)
        text = choice.get("sentence") or f"Take {quorum}+{backups}, since {choice.get('reason')}."
        had = "" if command or text.startswith("Keep") else " The run had this split."
        found.append(finding("plan", text + had, command))
    return found


def sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


# ---------------------------------------------------------------- commands


def to_go_on(path: Path, header: dict[str, Any]) -> str | None:
    """The command that resumes a run from its last checkpoint; None if there is no checkpoint."""
    folder = path if path.is_dir() else path.parent
    if header["engine"].get("name") not in ("local", "ray") or not CheckpointFolder(folder).versions():
        return None
    return command_to_go_on(folder)


def command_for(header: dict[str, Any], quorum: int, backups: int) -> str | None:
    """The command, or the line of a script, that repeats a run with another split; None if it had that split."""
    policy, engine = header["policy"], header["engine"]
    same_splits = ((BackupSync.name, quorum, quorum + backups), (FullSync.name, quorum, quorum))
    if (policy["name"], policy.get("quorum", header["workers"]), header["workers"]) in same_splits:
        return None
    if engine["name"] not in ("simulated", "local", "ray"):
        chosen = f"quorate.BackupSync({quorum}, {backups})" if backups else "quorate.FullSync()"
        return f"model = quorate.DataParallel(model, optimizer, {chosen})"
    options = {
        "task": header["task"],
        "model-bytes": None if header["task"] is not None else header.get("parameter_bytes"),
        "workers": f"{quorum}+{backups}" if backups else quorum,
        "engine": engine["name"] if engine["name"] == "ray" else None,
        **{name: engine.get(name) for name in ("latency", "network", "faults")},
        "batch-size": header.get("batch_size"),
        **{name: header.get(name) for name in ("epochs", "updates", "until")},
        **{name.replace("_", "-"): value for name, value in (header.get("learning") or {}).items()},
        "seed": header.get("seed") or None,
    }
    words = ["quorate", "simulate" if engine["name"] == "simulated" else "train"]
    words += ["--no-gradients"] if header["task"] is None else []
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)
