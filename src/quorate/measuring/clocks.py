"""Clocks that measure steps: the host's clock, and the events of a GPU, which runs behind the host.

A step is a list of marks. A mark is a moment and the activity of the process before it. The type of a moment depends on
the clock. `add` takes the marks of a step, `finish` returns the seconds of all steps.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

_READ_FROM = 32  # unread steps before the first is read; by then its events are usually over

#: Activities of a process before a mark. UNKNOWN counts as its own time; PAUSED time is in no column.
DATA, FORWARD, BACKWARD, OPTIMIZER, WAITING, UNKNOWN, PAUSED = range(7)
#: Values of a step: its own seconds, then the seconds of its phases and of waiting.
COLUMNS = ("seconds", "data", "forward", "backward", "optimizer", "waiting")
WIDTH = len(COLUMNS)

Marks = list[tuple[Any, int]]
_MISSING = (math.nan,) * WIDTH


def _row(spent: list[float]) -> tuple[float, ...]:
    """The columns of a step, from the seconds of each activity."""
    own = spent[DATA] + spent[FORWARD] + spent[BACKWARD] + spent[OPTIMIZER]
    if spent[UNKNOWN]:
        return (own + spent[UNKNOWN], math.nan, math.nan, math.nan, math.nan, spent[WAITING])
    return (own, spent[DATA], spent[FORWARD], spent[BACKWARD], spent[OPTIMIZER], spent[WAITING])


class HostClock:
    """The clock of the process, for devices on which a call returns when its work is done.

    now: the current moment, without a wrapper, since steps may be short.
    forget: takes back a moment that is no longer needed; None: the clock does not reuse moments.
    """

    forget: None = None

    def __init__(self) -> None:
        self._rows = array("d")
        self.now: Callable[[], float] = perf_counter

    def add(self, start: Any, marks: Marks) -> None:
        """Add a step; the next step starts at its last mark. Without marks the step could not be measured."""
        spent = [0.0] * 7
        for moment, kind in marks:
            spent[kind] += moment - start
            start = moment
        self._rows.extend(_row(spent) if marks else _MISSING)

    def finish(self) -> array[float]:
        """`COLUMNS` of all steps in one array; NaN for steps that could not be measured."""
        return self._rows


class CudaClock:
    """Events on the GPU's stream. They are read some steps later, so that no step waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = array("d")
        self._unread: deque[tuple[Any, Marks]] = deque()
        self._free: list[Any] = []  # events for reuse
        self.now: Callable[[], Any] = self._record
        self.forget: Callable[[Any], None] = self._free.append

    def _record(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None  # during the capture of a graph no step runs, and timed events would break the capture
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, start: Any, marks: Marks) -> None:
        self._unread.append((start, marks))
        while len(self._unread) > _READ_FROM and all(one.query() for one in _events(*self._unread[0])):
            self._read()

    def finish(self) -> array[float]:
        while self._unread:
            for event in _events(*self._unread[0]):
                event.synchronize()
            self._read()
        return self._rows

    def _read(self) -> None:
        start, marks = self._unread.popleft()
        events = _events(start, marks)
        if not marks or len(events) <= len(marks):
            self._rows.extend(_MISSING)
        else:
            spent = [0.0] * 7
            for before, (moment, kind) in zip(events, marks, strict=False):
                spent[kind] += before.elapsed_time(moment) / 1e3
            self._rows.extend(_row(spent))
        self._free.extend(events[:-1])  # the last event is the start of the next step


def _events(start: Any, marks: Marks) -> list[Any]:
    """All recorded events of a step. All must be over before reading, since they may be on different streams."""
    return [event for event in (start, *(moment for moment, _ in marks)) if event is not None]


Clock = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
