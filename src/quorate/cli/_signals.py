"""Ctrl-C and SIGTERM: both end a command with a sentence, and with the exit status that a shell expects."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_BOTH = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class Stopped(Exception):  # noqa: N818 - the user's wish, not an error
    """A signal ended a run; the message says what is left of it."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class Terminated(BaseException):
    """SIGTERM came, as KeyboardInterrupt says that Ctrl-C did. No exception, so that nobody catches it by chance."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does; by itself it would leave without a word."""
    if threading.current_thread() is not threading.main_thread():  # only there can signals be taken
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM to the end of the block, for imports: large libraries catch and so lose what comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []  # numbers of signals
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _BOTH}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, signal.SIG_DFL if action is None else action)
        if came:
            signal.raise_signal(came[0])


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
