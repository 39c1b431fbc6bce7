"""The command line. It starts fast: only the commands that need torch and matplotlib import them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import cast

from quorate.cli.signals import INTERRUPTED, TERMINATED, Stopped, Terminated, sigterm_raises, warnings_are_lines
from quorate.errors import BadInput, QuorateError, close_to


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 the run broke off, 2 bad input, 130 Ctrl-C, 143 SIGTERM.

    An exception in the user's own task is not caught, because the user needs its traceback.
    """
    try:
        import rich  # noqa: F401
        import typer

        from quorate.cli.app import app, tidy
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("typer", "rich"):
            raise
        return _say(f"error: the command line needs {library}, which is not installed; type: pip install {library}", 1)

    # The class of errors for wrong options; releases of typer define it in different modules.
    usage_error = cast(type[Exception], typer.BadParameter.__bases__[0])
    command = tidy(typer.main.get_command(app))
    try:
        with sigterm_raises(), warnings_are_lines():
            status = command.main(args=arguments, prog_name="quorate", standalone_mode=False)
    except QuorateError as error:
        status = 2 if isinstance(error, BadInput) else 1
        return _say("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), status)
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


def _usage(error: Exception) -> str:
    """The error message for wrong options, with a pointer to the help."""
    message = str(getattr(error, "format_message", error.__str__)()).strip()
    context = getattr(error, "ctx", None)
    alike = close_to(getattr(error, "option_name", ""), getattr(error, "possibilities", None) or ())
    message = re.sub(r"Input should be a valid (\w+), .*", r"it must be a valid \1", message)
    message = re.sub(r" \(Possible options:.*\)$", alike, message)
    message = re.sub(r"\. Did you mean '?([^']*?)'?\?$", r" (did you mean \1?)", message)
    return message if context is None else f"{message.rstrip('.')}; see '{context.command_path} --help'"


def _say(sentence: str, status: int) -> int:
    sys.stderr.write(sentence + "\n")
    return status
