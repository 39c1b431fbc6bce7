"""The live view in a terminal: a screen that is redrawn, or lines if stdout is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.cli.output import console, named_values
from quorate.cli.progress import LINE_S, clock_time
from quorate.errors import BadInput
from quorate.number_format import byte_size, seconds
from quorate.reporting.live.watcher import ABSENT, ENDED, QUIET_S, READING, RUNNING, UNREADABLE, Published, Watcher

if TYPE_CHECKING:
    from rich.console import RenderableType


_WAIT_S = 1.0
_REASONS, _CHOICES, _SLOWEST = 3, 3, 5


def watch_in_terminal(run: Path) -> None:
    """Show a run until it ends."""
    with Watcher(run) as watcher:
        last = _on_screen(watcher) if sys.stdout.isatty() else _in_lines(watcher)
    if last["status"] == UNREADABLE:
        raise BadInput(last["problem"])


def state_now(run: Path) -> dict[str, Any]:
    """The content of the page after all records written so far."""
    with Watcher(run) as watcher:
        content = _until_the_end(watcher, lambda content: None, (RUNNING, ENDED, UNREADABLE))
    if content["status"] == UNREADABLE:
        raise BadInput(content["problem"])
    return content


def _until_the_end(
    watcher: Watcher, show: Callable[[dict[str, Any]], None], ends: tuple[str, ...] = (ENDED, UNREADABLE)
) -> dict[str, Any]:
    published = Published(0, 0, {}, b"", b"")
    while True:
        published = watcher.wait(published.number, _WAIT_S)
        show(published.content)
        if published.content["status"] in ends:
            return published.content


def _on_screen(watcher: Watcher) -> dict[str, Any]:
    from rich.live import Live

    screen = console()
    with Live(console=screen, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
        return _until_the_end(watcher, lambda content: live.update(_view(content), refresh=True))


def _in_lines(watcher: Watcher) -> dict[str, Any]:
    """Print a line every few seconds, and all figures at the end."""
    next_at, said, status = 0.0, "", ""

    def show(content: dict[str, Any]) -> None:
        nonlocal next_at, said, status
        line = _line(content)
        due = time.monotonic() >= next_at or content["status"] != status
        if due and line != said and content["status"] not in (ENDED, UNREADABLE):
            next_at, said, status = time.monotonic() + LINE_S, line, content["status"]
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    content = _until_the_end(watcher, show)
    if content["status"] == ENDED:
        console().print(_view(content))
    return content


def status_text(content: dict[str, Any]) -> str:
    """The status of the run, or of reading its trace."""
    status, quiet_s = content["status"], content["quiet_s"]
    if status == ABSENT:
        return f"waiting for {content['trace']}, which is not there yet"
    if status == UNREADABLE:
        return str(content["problem"])
    if status == READING:
        return f"reading … {content['read_share']:.0%} ({content['records']:,} records)"
    go_on = "" if content["to_go_on"] is None else f"; to go on: {content['to_go_on']}"
    if status == ENDED:
        return f"the run has ended: {content['state']['ending']}{go_on}"
    if quiet_s is not None and quiet_s >= QUIET_S:
        return f"no news for {clock_time(quiet_s)}: an update takes long, or the run broke off{go_on}"
    return "running"


def _line(content: dict[str, Any]) -> str:
    state = content["state"]
    if state is None or content["status"] == READING:
        return status_text(content)
    parts = [_progress(content), f"{_rate(state['pace']['recent_per_s'])} updates/s"]
    if state["loss"]["last"] is not None:
        parts.append(f"loss {state['loss']['last']:.4g}")
    parts += [f"{one['name']} {_number(one['last'])}" for one in state["measures"]]
    parts.append(f"dropped {state['tickets']['drop_share']:.1%}")
    if status_text(content) != "running":
        parts.append(status_text(content))
    return ", ".join(parts)


def _progress(content: dict[str, Any]) -> str:
    state = content["state"]
    share = "" if state["share"] is None else f"{state['share']:.0%}, "
    expected = f" of {state['expected_updates']:,}" if state["expected_updates"] else ""
    virtual = "" if state["run"]["real"] else " virtual"
    left_s = content["wall"]["left_s"]
    left = "" if left_s is None else f", about {clock_time(left_s)} left"
    return f"{share}{state['updates']:,}{expected} updates, {seconds(content['newest_s'])}{virtual}{left}"


def _view(content: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    state = content["state"]
    if state is None:
        return Text(status_text(content))
    run = state["run"]
    found = [Text(line) for one in state["findings"] for line in (one["text"], one["command"]) if line]
    return Group(
        Text(f"{run['policy']} {run['subject']}, seed {run['seed']}"),
        *found,
        named_values(_numbers(content)),
        Text(status_text(content)),
    )


def _numbers(content: dict[str, Any]) -> list[tuple[str, str]]:
    state = content["state"]
    pace, tickets, staleness = state["pace"], state["tickets"], state["staleness"]
    found = [
        ("progress", _progress(content)),
        ("updates/s", f"{_rate(pace['recent_per_s'])} recent, {_rate(pace['per_s'])} overall"),
        (
            f"last {pace['recent_count']} updates",
            f"median {seconds(pace['recent_median_s'])}, p90 {seconds(pace['recent_p90_s'])}, "
            f"p99 {seconds(pace['recent_p99_s'])}",
        ),
        (
            "an update took",
            f"mean {seconds(pace['mean_s'])}, median {seconds(pace['median_s'])}, p99 {seconds(pace['p99_s'])}",
        ),
    ]
    if state["loss"]["last"] is not None:
        found.append(("loss", _number(state["loss"]["last"])))
    found += [(one["name"], _number(one["last"])) for one in state["measures"]]
    found += _kth(state["kth_arrival_s"])
    found.append(
        (
            "tickets",
            f"{tickets['applied']:,} applied, {tickets['dropped']:,} dropped ({tickets['drop_share']:.1%}), "
            f"{tickets['lost']:,} lost",
        )
    )
    found += [("", f"{one['count']:,} × {one['reason']}") for one in tickets["reasons"][:_REASONS]]
    found.append(("staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']}"))
    sent, used = state["bytes"]["sent"], state["bytes"]["used"]
    if sent:
        found.append(("bytes", f"{byte_size(sent)} sent, {used / sent:.1%} used"))
    found += [
        ("chosen" if place == 0 else "", f"quorum {one['quorum']} at update {one['version']:,}: {one['reason']}")
        for place, one in enumerate(state["choices"][:_CHOICES])
    ]
    return [*found, *_workers(state["workers"])]


def _kth(kth: dict[str, list[float]]) -> list[tuple[str, str]]:
    """Mean times of the first, the middle and the last arrival of a round."""
    count = len(kth["k"])
    if not count:
        return []
    places = sorted({0, count // 2, count - 1})
    text = ", ".join(f"k = {kth['k'][place]}: {seconds(kth['mean_s'][place])}" for place in places)
    return [("k-th arrival, mean", text)]


def _workers(workers: dict[str, Any]) -> list[tuple[str, str]]:
    states = ", ".join(f"{count:,} {state}" for state, count in workers["states"].items() if count)
    found = [("workers", states or "none yet")]
    slowest = sorted(workers["rows"], key=lambda one: -(one["slowness"] or 0.0))[:_SLOWEST]
    text = ", ".join(f"{one['worker']} ({one['slowness']:.2f}×)" for one in slowest if one["slowness"] is not None)
    if text and workers["count"] > 1:
        found.append(("slowest lately", f"{text} of the median"))
    return found


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _rate(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
