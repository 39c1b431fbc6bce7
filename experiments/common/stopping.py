"""Ctrl-C and SIGTERM: both end a command with one sentence, and with the exit status that a shell expects."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does; by itself it would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():  # only there can signals be taken
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def status_of(stopped: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM."""
    return TERMINATED if "SIGTERM" in str(stopped) else INTERRUPTED


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt("SIGTERM")
