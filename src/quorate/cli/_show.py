"""Results as a person or a program reads them, on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from quorate.reporting.comparison import REAL, VIRTUAL, seconds_are
from quorate.reporting.plain import finite

if TYPE_CHECKING:
    from rich.console import Console

    from quorate.running import Result


def print_json(value: Any) -> None:
    """One JSON object and nothing else. NaN and Inf, which JSON has not, become null."""
    sys.stdout.write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def console(width: int | None = None) -> Console:
    """Where tables go: stdout, without colours where it is no terminal."""
    from rich.console import Console

    return Console(highlight=False, width=width)


def print_summary(result: Result, label: str) -> None:
    """What one run came to."""
    from rich.table import Table
    from rich.text import Text

    header = result.metrics.header
    subject = f"on {header['task']}" if header["task"] else "without gradients"
    where = cluster_text(header) if seconds_are(header) == REAL else f"latency {header['engine']['latency']}"
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    for name, value in _lines(result):
        lines.add_row(name, Text(value))
    if result.out is not None:
        lines.add_row("files", Text(str(result.out)))
    screen = console()
    screen.print(Text(f"{label} {subject}, seed {header['seed']}, {where}"))
    screen.print(lines)


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
    """What a run was made on, and whether its seconds are real."""
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


def seconds(value: float | None) -> str:
    """A time with its unit, three digits."""
    if value is None:
        return "–"
    if value < 1e-6:
        return "0 s"
    if value < 1:
        return f"{_three(value * 1e3)} ms" if value >= 1e-3 else f"{_three(value * 1e6)} µs"
    return f"{_three(value)} s"


def _three(value: float) -> str:
    """Three digits, zeros at the end included."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def megabytes(size: int) -> str:
    """Without the unit, for a table."""
    value = size / 1e6
    if 0 < value < 0.1:
        return "<0.1"
    return _three(value)


def byte_size(size: float) -> str:
    """With a unit, three digits."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{_three(size)} {units[-1]}"
