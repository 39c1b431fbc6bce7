"""`quorate watch`: look at a run while it goes on, in a browser or in the terminal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorate.cli._signals import INTERRUPTED, TERMINATED, Stopped, Terminated, signals_wait
from quorate.errors import BadInput

if TYPE_CHECKING:
    from quorate.reporting.live.server import Server


def watch(
    run: Annotated[
        Path,
        typer.Argument(help="The folder of a run, or its trace.jsonl; it need not be there yet.", metavar="RUN"),
    ],
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it here instead of in a browser, until the run ends.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            help="Where the page is served, on this machine only.", show_default="a free one", min=1, max=65535
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and leave opening it to you.")] = False,
) -> None:
    """Watch a run while it goes on: progress, loss, times, staleness, drops, bytes and every worker.

    Nothing is changed by looking, and a run need not know that it is watched. Works on a finished run too.
    """
    if terminal and (port is not None or no_open):
        raise BadInput(f"{'--port' if port is not None else '--no-open'} is for the page; leave it out with --terminal")

    try:
        with signals_wait():
            from quorate.reporting.live.follower import Follower, trace_file

            if terminal:
                from quorate.cli._watching import watch_in_terminal
            else:
                from quorate.reporting.live.server import Server
        with closing(Follower(trace_file(run))) as first_look:
            first_look.read()  # what is no trace is said at once, not on a page
        if terminal:
            watch_in_terminal(run)
        else:
            _serve(run, Server, port or 0, opens=not no_open)
    except (KeyboardInterrupt, Terminated) as signal:
        status = TERMINATED if isinstance(signal, Terminated) else INTERRUPTED
        raise Stopped("stopped watching; the run itself was not touched", status) from None


def _serve(run: Path, serving: type[Server], port: int, opens: bool) -> None:
    from quorate.reporting.live.watcher import Watcher

    with Watcher(run) as watcher, serving(watcher, port) as server:
        typer.echo(f"watching {watcher.path}")
        if not watcher.path.exists():
            typer.echo("it is not there yet; the page waits for it")
        typer.echo(f"{server.url}\nCtrl-C ends this; the run goes on")
        if opens:
            _open(server.url)
        server.run()


def _open(url: str) -> None:
    """In the user's browser, where there is a screen; a browser for terminals would take this one over."""
    import os
    import sys
    import webbrowser

    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    webbrowser.open(url)
