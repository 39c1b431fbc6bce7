"""How long to wait for a worker that does not answer: told by how long answers took so far."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_REMEMBERED = 256  # answers
_BEFORE_ANY_S = 3.0  # what an answer is taken to take before there was one


class SilenceLimits(NamedTuple):
    """Seconds without an answer after which a worker counts as lost, by what the system says that it does."""

    stopped: float  # somebody stopped it (SIGSTOP); it will not answer before it is continued
    silent: float  # it waits for something and uses no CPU
    hanging: float  # it computes without end


class AnswerTimes:
    """The recent times from an order to its answer. A worker is not lost for being as slow as workers are."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._slowest = _BEFORE_ANY_S

    def add(self, seconds: float) -> None:
        recent = self._recent
        leaving = recent[0] if len(recent) == _REMEMBERED else None
        recent.append(seconds)
        if len(recent) == 1 or seconds >= self._slowest:
            self._slowest = seconds
        elif leaving == self._slowest:
            self._slowest = max(recent)

    def limits(self, warm: bool = True) -> SilenceLimits:
        """A multiple of the slowest recent answer; the constants are for a machine that is busy with other things.

        A worker that is not warm, because its first answer is yet to come, has more to do: compile, load, initialise.
        """
        slowest = self._slowest
        usual = slowest if warm else max(slowest, _BEFORE_ANY_S)
        return SilenceLimits(0.25 + 3 * slowest, 10 + 50 * usual, 60 + 200 * usual)
