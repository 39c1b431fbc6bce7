"""Why a run stops: a condition that the user gave holds, or a signal comes.

SIGINT and SIGTERM: the first signal ends a run after the current update, at most 5 s later; a second ends it now. A
running evaluation also gets 5 s.
"""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from quorate.errors import BadInput, close_to
from quorate.trace import Recorder, Update


class Until(NamedTuple):
    """A condition on a run, e.g. `accuracy>=0.95` or `seconds>=3600`; checked when its value is known."""

    name: str
    relation: str
    target: float

    def holds(self, values: Mapping[str, float]) -> bool:
        value = values.get(self.name)
        if value is None or math.isnan(value):
            return False
        return value >= self.target if self.relation == ">=" else value <= self.target

    def text(self) -> str:
        return f"{self.name}{self.relation}{self.target!r}"


def parse_until(text: str) -> Until:
    match = re.fullmatch(r"\s*([A-Za-z_][\w./ -]*?)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", text)
    if match is None:
        raise BadInput(f"until {text!r} is not understood; write e.g. 'accuracy>=0.95', 'loss<=0.1' or 'seconds>=60'")
    return Until(match[1], match[2], float(match[3]))


class KnownMeasure(Recorder):
    """Refuses a condition on a value that the task does not measure: it would never hold, and the run never end."""

    def __init__(self, condition: Until, *, ends_run: bool) -> None:
        self._condition = condition
        self._always = ("loss", "samples", "seconds", "updates") if ends_run else ()
        self._measured_by = 0  # version by which an evaluation must have come

    def run(self, header: dict[str, Any]) -> None:
        self._measured_by = header["evaluate_every"]

    def applied(self, time: float, update: Update) -> None:
        if update.version > self._measured_by:  # the task gave no measures, so it never will
            self._check(())

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        self._check(tuple(measures))

    def _check(self, measured: tuple[str, ...]) -> None:
        check_known(self._condition, (*measured, *self._always), "the task")
        self._measured_by = 2**62


def check_known(condition: Until, known: tuple[str, ...], who: str) -> None:
    if condition.name in known:
        return
    if not known:
        raise BadInput(
            f"{condition.text()} cannot be measured: the task has no evaluate() that gives {condition.name!r}"
        )
    names = ", ".join(sorted(known))
    guess = close_to(condition.name, known)
    raise BadInput(
        f"{condition.text()} cannot be measured: {who} gives no {condition.name!r}{guess}; choose one of: {names}"
    )


# ---------------------------------------------------------------- signals


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
