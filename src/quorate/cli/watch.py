"""`quorate watch`: the live view of a run, in a browser or in the terminal."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import OUTPUT, RunArgument, option
from quorate.cli.output import print_json
from quorate.cli.signals import INTERRUPTED, TERMINATED, Stopped, Terminated, signals_wait
from quorate.errors import BadInput

SHOWN = "Where it is shown"


def watch(
    run: RunArgument,
    wait: Annotated[
        bool, option(SHOWN, "Wait for a run that has not started yet, instead of refusing the path.", "--wait")
    ] = False,
    terminal: Annotated[
        bool, option(SHOWN, "Show it here instead of in a browser, until the run ends.", "--terminal")
    ] = False,
    port: Annotated[
        int | None,
        option(
            SHOWN,
            "Where the page is served, on this machine only.",
            show_default="a free one",
            min=1,
            max=65535,
            metavar="PORT",
        ),
    ] = None,
    json: Annotated[
        bool, option(OUTPUT, "Print what the page shows now as one JSON object on stdout, and end.", "--json")
    ] = False,
    no_open: Annotated[bool, option(SHOWN, "Print the address, and leave opening it to you.", "--no-open")] = False,
) -> None:
    """Watch a run while it goes on: progress, loss, times, staleness, drops, bytes and every worker.

    Watching does not affect the run, and needs no preparation. It works for a finished run too.
    """
    if terminal and (port is not None or no_open):
        raise BadInput(f"{'--port' if port is not None else '--no-open'} is for the page; leave it out with --terminal")

    try:
        with signals_wait():
            from quorate.reporting.live.watcher import Follower, trace_file
            from quorate.trace import is_empty

            if terminal:
                from quorate.cli.terminal_view import watch_in_terminal
            else:
                import quorate.reporting.live.server  # noqa: F401 - imported while signals are deferred
        with closing(Follower(trace_file(run))) as first_look:
            news = first_look.read()
            if news.damage is not None:  # a damaged file is an error of the command, not a page
                raise news.damage
            if not first_look.exists and not wait:
                raise BadInput(_no_run(run))
            if first_look.exists and first_look.size_bytes == 0 and not wait:
                raise BadInput(f"{is_empty(first_look.path)}. Add --wait to wait for its next start")
        if json:
            from quorate.cli.terminal_view import state_now

            print_json(state_now(run))
        elif terminal:
            watch_in_terminal(run)
        else:
            _serve(run, port or 0, opens=not no_open)
    except (KeyboardInterrupt, Terminated) as signal:
        status = TERMINATED if isinstance(signal, Terminated) else INTERRUPTED
        raise Stopped("stopped watching; the run itself was not touched", status) from None


def _no_run(run: Path) -> str:
    """The error message for a path without a run, with a similar path if there is one."""
    from difflib import get_close_matches

    from quorate.reporting.live.watcher import trace_file
    from quorate.trace import TRACE_FILE

    folder = trace_file(run).parent
    inside, beside = (
        sorted(trace.parent for trace in place.glob(f"*/{TRACE_FILE}")) for place in (folder, folder.parent)
    )
    if inside:
        return f"{str(run)!r} is a folder of runs ({len(inside)}); name one of them, such as {str(inside[-1])!r}"
    near = get_close_matches(str(folder), map(str, beside), n=1)
    meant = f"did you mean {near[0]!r}?" if near else "check the path."
    return f"there is no run in {str(run)!r}; {meant} Add --wait to wait for a run that has not started yet"


def _serve(run: Path, port: int, opens: bool) -> None:
    import webbrowser

    from quorate.reporting.live.server import Server
    from quorate.reporting.live.watcher import Watcher

    with Watcher(run) as watcher, Server(watcher, port) as server:
        typer.echo(f"watching {watcher.path}")
        if not watcher.path.exists():
            typer.echo("the run has not started yet; the page waits for it")
        typer.echo(f"{server.url}\nCtrl-C ends this; the run goes on")
        # Without a screen, `webbrowser` could start a text browser, which would take over this terminal.
        has_screen = (
            not sys.platform.startswith("linux") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        )
        if opens and has_screen:
            webbrowser.open(server.url)
        server.run()
