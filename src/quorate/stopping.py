"""SIGINT and SIGTERM: the first ends a run after the update under way, a second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody has asked the run to end."""

    #: Not even the update under way is waited for.
    at_once = False

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        return None if self.signal is None else f"stopped by {self.signal.name}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals, where they can be taken: Python delivers them to the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        try:
            yield
        finally:
            self._give_back()

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._give_back()  # whoever asks again means it

    def _give_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}


class RecordedStop(Stop):
    """The end of a recorded run that somebody ended: when its trace is over."""

    at_once = True

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._recorded = reason
        self.reached = False

    @property
    def reason(self) -> str | None:
        return self._recorded if self.reached else None
