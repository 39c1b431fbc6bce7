"""Ctrl-C, SIGTERM and warnings during a command: one line each, and the exit status that a shell expects."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_BOTH = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class Stopped(Exception):  # noqa: N818 - requested by the user, not an error
    """A signal ended a run; the message says what was saved."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class Terminated(BaseException):
    """Raised on SIGTERM, like KeyboardInterrupt on Ctrl-C. A BaseException, so that `except Exception` misses it."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise inside the block; by default it would end the process without a message."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block. For imports: large libraries catch and lose them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []  # signal numbers
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _BOTH}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, signal.SIG_DFL if action is None else action)
        if received:
            signal.raise_signal(received[0])


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


_PACKAGE = Path(__file__).parent.parent


@contextmanager
def warnings_are_lines() -> Iterator[None]:
    """Print warnings of quorate as `warning: …`, without file name and line number; others stay unchanged."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=RuntimeWarning, module=r"quorate(\.|$)")
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any) -> None:
            if issubclass(category, RuntimeWarning) and Path(filename).is_relative_to(_PACKAGE):
                sys.stderr.write(f"warning: {message}\n")
            else:
                usual(message, category, filename, *rest, **named)

        warnings.showwarning = show
        yield
