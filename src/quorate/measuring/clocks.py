"""Clocks that a step is measured with: the host's, and the GPU's, which runs behind it.

A step is made of spans (from moment, to moment) in which the process did work of its own. What a moment is, only its
clock knows; `add` takes the spans of a step, `finish` gives the seconds of all steps.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

_READ_FROM = 32  # steps whose events wait to be read; by then the first ones are over

Spans = list[tuple[Any, Any]]


class Clock(Protocol):
    """What the hooks ask of a clock."""

    now: Callable[[], Any]
    """This moment."""

    @property
    def forget(self) -> Callable[[Any], None] | None:
        """What to do with a moment that is no longer needed; None: nothing."""

    def add(self, spans: Spans) -> None:
        """A step is over; no spans: it could not be measured."""

    def add_one(self, start: Any, end: Any) -> None:
        """A step of one span is over."""

    def finish(self) -> array[float]:
        """Seconds of every step, NaN where it could not be measured."""


class HostClock:
    """The clock of the process, right where work is done when the call returns."""

    forget: None = None

    def __init__(self) -> None:
        self._seconds = array("d")
        self.now: Callable[[], float] = perf_counter  # asked twice a step, and a step may be short

    def add(self, spans: Spans) -> None:
        self._seconds.append(sum(end - start for start, end in spans) if spans else math.nan)

    def add_one(self, start: float, end: float) -> None:
        self._seconds.append(end - start)

    def finish(self) -> array[float]:
        return self._seconds


class CudaClock:
    """Events on the GPU's stream. They are read when they are long over, so that no step waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = array("d")
        self._unread: deque[Spans] = deque()
        self._free: list[Any] = []  # events to use again
        self.now: Callable[[], Any] = self._record
        self.forget: Callable[[Any], None] = self._free.append  # of what `now` gave

    def _record(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None  # a graph is being captured: the step is not run, and timed events would break the capture
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add_one(self, start: Any, end: Any) -> None:
        self.add([(start, end)])

    def add(self, spans: Spans) -> None:
        self._unread.append(spans)
        while len(self._unread) > _READ_FROM and all(one.query() for one in _events(self._unread[0])):
            self._read()

    def finish(self) -> array[float]:
        while self._unread:
            for event in _events(self._unread[0]):
                event.synchronize()
            self._read()
        return self._seconds

    def _read(self) -> None:
        spans = self._unread.popleft()
        events = _events(spans)
        if spans and len(events) == 2 * len(spans):
            self._seconds.append(sum(start.elapsed_time(end) for start, end in spans) / 1e3)
        else:
            self._seconds.append(math.nan)
        self._free.extend(events)


def _events(spans: Spans) -> list[Any]:
    """Those that were recorded; both ends, since streams may be different ones."""
    return [event for span in spans for event in span if event is not None]


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
