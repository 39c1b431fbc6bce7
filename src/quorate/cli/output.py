"""Results on stdout: summaries of runs, tables of comparisons and plans, as text or as JSON."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quorate.number_format import byte_size, duration, number, percent, seconds, three
from quorate.reporting.comparison import REAL, VIRTUAL, Row, finite, seconds_are

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from quorate.planning import Plan, Split
    from quorate.run import Result
    from quorate.stopping import Until


def print_json(value: Any) -> None:
    """Print one JSON object and nothing else. NaN and Inf become null."""
    sys.stdout.write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def console(width: int | None = None) -> Console:
    """A console for stdout, without colours if stdout is no terminal."""
    from rich.console import Console

    return Console(highlight=False, width=width)


def print_result(result: Result, label: str, as_json: bool) -> None:
    """Print the result of one run, and its folder. A problem of the run is exit status 1."""
    if as_json:
        print_json({**result.summary, "out": None if result.out is None else str(result.out)})
    else:
        _print_summary(result, label)
    if result.problem is not None:
        raise typer.Exit(1)


def named_values(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    for name, value in rows:
        lines.add_row(Text(name), Text(value))
    return lines


def _print_summary(result: Result, label: str) -> None:
    from rich.text import Text

    header = result.metrics.header
    subject = f"on {header['task']}" if header["task"] else "without gradients"
    where = cluster_text(header) if seconds_are(header) == REAL else f"latency {header['engine']['latency']}"
    files = [] if result.out is None else [("files", str(result.out))]
    screen = console()
    screen.print(Text(f"{label} {subject}, seed {header['seed']}, {where}"))
    screen.print(named_values([*_lines(result), *files]))
    screen.print(Text(what_next(result.out)), soft_wrap=True)


def what_next(out: Path | None, what: str = "trace") -> str:
    """The last line of a result: the command that shows more, or a hint that nothing was saved."""
    if out is None:
        return f"nothing was saved; --out FOLDER keeps the {what} for report, plan and replay"
    return f"next: quorate report {shlex.quote(str(out))}"


def _lines(result: Result) -> list[tuple[str, str]]:
    summary = result.summary
    tickets, samples, size, work = (summary[key] for key in ("tickets", "samples", "bytes", "worker_seconds"))
    ended = max(1, tickets["applied"] + tickets["dropped"] + tickets["lost"])
    lines = [
        (
            "updates",
            f"{summary['updates']:,} in {seconds(summary['seconds'])} of {seconds_are(result.metrics.header)} time",
        ),
        ("an update took", _spread(summary["update_seconds"])),
        (
            "tickets",
            f"{tickets['applied']:,} applied, {tickets['dropped']:,} dropped "
            f"({tickets['dropped'] / ended:.1%}), {tickets['lost']:,} lost",
        ),
        *(("", f"{count:,} × {reason}") for reason, count in tickets["reasons"].items()),
        ("samples", f"{samples['applied']:,} applied, {samples['distinct']:,} distinct"),
        ("staleness", f"mean {summary['staleness']['mean']:.2f}, max {summary['staleness']['max']}"),
    ]
    if summary.get("choices") is not None:
        lines.append(("quorum", f"{summary['choices']['made']:,} choices; the last: {summary['choices']['last']}"))
    time = work["compute"] + work["idle"]
    if time > 0:
        wasted, idle = work["wasted"] / time, work["idle"] / time
        lines.append(
            ("worker time", f"{1 - wasted - idle:.1%} applied, {wasted:.1%} on dropped work, {idle:.1%} waiting")
        )
    if size["sent"]:
        lines.append(("bytes", f"{byte_size(size['sent'])} sent, {size['used'] / size['sent']:.1%} used"))
    if summary["loss"] is not None:
        lines.append(("last loss", f"{summary['loss']:.4g}"))
    lines += [(name, f"{value:.4g}") for name, value in summary["evaluation"].items()]
    if summary["digest"] is not None:
        lines.append(("digest", summary["digest"]))
    return lines


def cluster_text(header: dict[str, Any]) -> str:
    """The cluster of a run, and whether its seconds are real."""
    count, latency = header["workers"], header["engine"]["latency"]
    if seconds_are(header) == VIRTUAL:
        return f"{count} simulated workers, virtual seconds; latency {latency}"
    delays = "" if latency is None else f"; artificial delays {latency}"
    if header["engine"]["name"] == "ray":
        shards = header["engine"]["shards"]
        return f"{_some(count, 'worker')} and {_some(shards, 'shard')} on Ray, real seconds{delays}"
    return f"{count} worker {'process' if count == 1 else 'processes'}, real seconds{delays}"


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _spread(times: dict[str, float | None]) -> str:
    if times["mean"] is None:
        return "–"
    return ", ".join(f"{name} {seconds(value)}" for name, value in times.items())


def megabytes(size: int) -> str:
    """Megabytes without the unit, for a table."""
    return "<0.1" if 0 < size < 1e5 else three(size / 1e6)


WIDE = 100  # columns of a terminal from which on headings are not split


def print_table(rows: Sequence[Row], target: Until | None, measure: str | None, header: dict[str, Any]) -> None:
    """Print the cluster, from the header of one of the runs, and one row per run."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    screen.print(Text(f"{cluster_text(header)}, seed {header['seed']}"))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    columns = _columns(rows, target, measure, seconds_are(header))
    for index, (heading, _) in enumerate(columns):
        table.add_column(
            heading if screen.width < WIDE else heading.replace("-\n", ""),
            justify="left" if index == 0 else "right",
            vertical="bottom",
            no_wrap=True,
        )
    if screen.width < WIDE:
        columns[0] = ("policy", [row.label.replace(", ", ",\n  ") for row in rows])
    for index in range(len(rows)):
        table.add_row(*(Text(cells[index]) for _, cells in columns))
    _print_wide(table)


def _columns(
    rows: Sequence[Row], target: Until | None, measure: str | None, kind_of_seconds: str
) -> list[tuple[str, list[str]]]:
    columns: list[tuple[str, list[str]]] = [("policy", [row.label for row in rows])]
    if target is not None:
        columns.append((f"time to\n{target.target:g}", [_reached(row) for row in rows]))
    else:
        columns.append((f"{kind_of_seconds}\ntime", [seconds(row.seconds) for row in rows]))
        columns.append(("samples\nper s", [_number(row.samples_per_s) for row in rows]))
    columns.append(("speed\nup", ["–" if row.speed_up is None else f"×{row.speed_up:.2f}" for row in rows]))
    if any(row.final is not None for row in rows):
        name = "last\nloss" if measure is None else f"final\n{measure.replace('_', chr(10))}"
        columns.append((name, ["–" if row.final is None else f"{row.final:.3f}" for row in rows]))
    columns += [
        ("up-\ndates", [f"{row.updates:,}" for row in rows]),
        ("stale\navg/max", [f"{row.staleness_mean:.1f}/{row.staleness_max}" for row in rows]),
        ("drop-\nped", [f"{row.dropped_share:.0%}" for row in rows]),
        ("was-\nted", [f"{row.wasted_share:.0%}" for row in rows]),
        ("wait-\ning", [f"{row.waiting_share:.0%}" for row in rows]),
    ]
    if any(row.bytes_sent for row in rows):
        columns += [
            ("MB\nsent", [megabytes(row.bytes_sent) for row in rows]),
            ("bytes\nused", ["–" if row.bytes_used_share is None else f"{row.bytes_used_share:.0%}" for row in rows]),
        ]
    return columns


def _reached(row: Row) -> str:
    if row.time_to_target_s is None:
        return "broke off" if row.broke_off else "never"
    return seconds(row.time_to_target_s)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


_MOST_ROWS = 12


def print_plan(plan: Plan, every: bool) -> None:
    """Print the recommendation first, then the figures behind it."""
    from rich.padding import Padding
    from rich.text import Text

    screen = console()
    say: Any = screen.print
    found = plan.recommendation
    for caution in plan.cautions:
        say(Text(f"Careful: {caution}.", style="bold yellow"))
    say(Text(plan.sentence, style="bold"))
    say(Text(f"Why: {found.reason}."))
    for sentence in plan.why_not:
        say(Text(f"{sentence[0].upper()}{sentence[1:]}."))
    if found.changes:
        say(Text(f"It would be {'; or '.join(found.changes)}."))
    for slow in plan.slow:
        say(Text(f"{slow.sentence()[0].upper()}{slow.sentence()[1:]}."))
    if not plan.slow and plan.machines > 1:
        say(Text("Nobody is always slow: no worker is 20% behind the middle one throughout."))
    say()
    what = "left to finish" if plan.late == "finish" else "cancelled"
    machines = "1 machine" if plan.machines == 1 else f"{plan.machines} machines"
    say(Text(f"{machines}, from {plan.source} ({plan.rounds:,} rounds), late work {what}"))
    say(Text(plan.effort.sentence), style="dim")
    if every or not found.is_kept:
        _print_wide(_splits(plan, every))
    else:
        say(Text("Figures of other splits are left out, as they do not hold; --all shows them."))
    if plan.others:
        say()
        say(Text("Other policies, simulated in the same world"))
        _print_wide(_others(plan))
    if plan.fits and not found.is_kept:
        say()
        fits = ", ".join(f"{_rounded(fit.text)} ({fit.distance:.3f})" for fit in plan.fits)
        say(Text(f"Fits to all times, with their distance (Kolmogorov and Smirnov's): {fits}"), style="dim")
    for note in plan.notes:
        say(Text(f"Note: {note}."))
    for text, other in plan.what_if:
        say()
        say(Text(f"What if {text}: {other.sentence}", style="bold"))
        say(Padding(Text(f"{other.recommendation.reason}."), (0, 0, 0, 2)))
        for note in other.notes:
            if note not in plan.notes:
                say(Padding(Text(f"Note: {note}."), (0, 0, 0, 2)))
    say()
    say(Text(f"Paste: {found.python(plan.late)}", style="bold"))
    say(Text(f"Or:    {found.command(plan.late)}", style="bold"))


def _splits(plan: Plan, every: bool) -> Table:
    table = _table("", "N+b", "mean", "±", "median", "p99", "updates", "time", "wasted", "bytes an update")
    shown = plan.splits if every else _selected_splits(plan)
    best = plan.recommendation.time
    for split in reversed(shown):
        mine = split.quorum == plan.recommendation.quorum
        table.add_row(
            "▶" if mine else "",
            f"{split.quorum}+{split.backups}",
            seconds(split.mean) if math.isfinite(split.mean) else "infinite",
            _interval(split),
            seconds(split.median),
            seconds(split.p99),
            f"×{number(split.updates)}",
            duration(split.time) if plan.effort.is_absolute else _times(split.time / best),
            percent(split.wasted),
            "–" if split.bytes is None else byte_size(split.bytes),
            style="bold" if mine else None,
        )
    beside = "" if plan.effort.is_absolute else "; time: beside the split marked ▶"
    table.caption = f"updates: beside the split that needs fewest{beside}"
    table.caption_justify = "left"
    return table


def _selected_splits(plan: Plan) -> list[Split]:
    """The recommended split and its neighbours, the ends, and some splits in between."""
    splits = plan.splits
    if len(splits) <= _MOST_ROWS:
        return list(splits)
    place, last = plan.recommendation.quorum - 1, len(splits) - 1
    wanted = {0, last, *(place + step for step in (-2, -1, 0, 1, 2))}
    wanted |= {round(last * share) for share in (0.25, 0.5, 0.75, 0.9, 0.95)}
    return [splits[index] for index in sorted(wanted) if 0 <= index <= last]


def _others(plan: Plan) -> Table:
    table = _table("", "policy", "an update", "gradients", "staleness", "updates", "time", "wasted")
    for one in plan.others:
        at_least = "≥ " if one.is_lower_bound else ""
        time = duration(one.time) if plan.effort.is_absolute else _times(one.time / plan.recommendation.time)
        table.add_row(
            "",
            one.label,
            seconds(one.seconds_per_update),
            number(one.gradients),
            number(one.staleness),
            f"{at_least}×{number(one.updates)}",
            f"{at_least}{time}",
            percent(one.wasted),
        )
    if any(one.is_lower_bound for one in plan.others):
        table.caption = "≥: what staleness costs in updates is not in it"
        table.caption_justify = "left"
    return table


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    return table


def _print_wide(table: Table) -> None:
    """Print a table without truncating it: lines that are too long are better than numbers that are cut off."""
    needed = console(width=1000).measure(table).maximum
    console(width=max(needed, console().width)).print(table)


def _interval(split: Split) -> str:
    if not math.isfinite(split.mean) or not math.isfinite(split.high):
        return "–"
    return percent((split.high - split.low) / 2 / split.mean) if split.high > split.low else "exact"


def _times(ratio: float) -> str:
    return f"×{number(ratio)}" if math.isfinite(ratio) else "infinite"


def _rounded(law: str) -> str:
    """The text of a law with four digits per number, which is the accuracy of a fit."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.4g}", law)
