"""SIGINT and SIGTERM: the first signal ends a run after the current update, at most 5 s later; a second ends it now.

A running evaluation also gets 5 s.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds that the current update may still take after a signal. `docker stop` kills after 10 s.
FINISH_S = 5.0


class EvaluationCutOff(KeyboardInterrupt):
    """Raised in the task's evaluate(): a signal came, and the evaluation did not end within FINISH_S."""


class Stop:
    """A request to end the run, made by a signal."""

    #: Whether to end without waiting for the current update.
    at_once = False

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._handlers_before: dict[int, Any] = {}
        self._deadline: float | None = None  # of the current update, once a signal has come
        self._evaluates = False  # the main process is in the task's evaluate()
        self._alarm_before: Any = None  # the previous handler of SIGALRM, while the timer is set
        self._was_cut_off = False

    @property
    def reason(self) -> str | None:
        return None if self.signal is None else f"stopped by {self.signal.name}"

    def is_due(self, now: float, give_up_at: float | None) -> bool:
        """Whether the run ends now, or waits for its current update. It does not wait while workers are missing."""
        self._deadline = now + FINISH_S if self._deadline is None else self._deadline
        return self.at_once or give_up_at is not None or now >= self._deadline

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; only in the main thread, because Python delivers them to no other."""
        if threading.current_thread() is threading.main_thread():
            self._handlers_before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        try:
            yield
        finally:
            self._restore_handlers()

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore_handlers()  # a second signal ends the process at once
        if self._evaluates:
            self._set_timer()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Limit an evaluation in the main process to FINISH_S after a signal, by raising EvaluationCutOff in it."""
        self._evaluates = True
        try:
            if self.signal is not None:
                self._set_timer()
            yield
        except KeyboardInterrupt as error:
            if self._was_cut_off and not isinstance(error, EvaluationCutOff):  # Ray raises an exception of its own
                raise EvaluationCutOff from error
            raise
        finally:
            self._evaluates = False
            if self._alarm_before is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, self._alarm_before)
                self._alarm_before = None

    def _set_timer(self) -> None:
        """Set a system timer: its signal wakes the main thread, also from a blocking call."""
        before = signal.signal(signal.SIGALRM, self._cut_off)
        self._alarm_before = signal.SIG_DFL if before is None else before
        signal.setitimer(signal.ITIMER_REAL, FINISH_S)

    def _cut_off(self, _number: int, _frame: FrameType | None) -> None:
        self._was_cut_off = True
        raise EvaluationCutOff

    def _restore_handlers(self) -> None:
        for number, before in self._handlers_before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._handlers_before = {}


class RecordedStop(Stop):
    """The end of a recorded run that was stopped early: its replay stops where the trace ends."""

    at_once = True

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._recorded = reason
        self.reached = False

    @property
    def reason(self) -> str | None:
        return self._recorded if self.reached else None
