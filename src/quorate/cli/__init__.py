"""The command line. Quick to start: torch and the figures are imported only by the commands that need them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

from quorate.cli._signals import INTERRUPTED, TERMINATED, Stopped, Terminated, sigterm_raises
from quorate.cli._warnings import warnings_are_lines
from quorate.errors import BadInput, QuorateError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status: 0 fine, 1 the run broke off, 2 bad input, 130 Ctrl-C, 143 SIGTERM.

    An exception in the user's own task is not caught: its traceback is what they need.
    """
    try:
        import rich  # noqa: F401
        import typer

        from quorate.cli._app import app
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("typer", "rich"):
            raise
        return _say(f"error: the command line needs {library}, which is not installed; type: pip install {library}", 1)

    # What a wrong option raises; the class has another home in each release of typer.
    usage_error = cast(type[Exception], typer.BadParameter.__bases__[0])
    command = typer.main.get_command(app)
    try:
        with sigterm_raises(), warnings_are_lines():
            status = command.main(args=arguments, prog_name="quorate", standalone_mode=False)
    except QuorateError as error:
        return _say("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), _status(error))
    except Stopped as stopped:
        return _say(str(stopped), stopped.status)
    except Terminated:
        return _say("stopped", TERMINATED)
    except (KeyboardInterrupt, typer.Abort):
        return _say("stopped", INTERRUPTED)
    except usage_error as error:
        return _say(f"error: {_usage(error)}", 2)
    if status == INTERRUPTED:
        return _say("stopped", INTERRUPTED)
    return status if isinstance(status, int) else 0


def _status(error: QuorateError) -> int:
    return 2 if isinstance(error, BadInput) else 1


def _usage(error: Exception) -> str:
    """What was wrong with the options, and where to read about them."""
    message = str(getattr(error, "format_message", error.__str__)()).strip()
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message.rstrip('.')}; see '{context.command_path} --help'"


def _say(sentence: str, status: int) -> int:
    sys.stderr.write(sentence + "\n")
    return status
