"""Rounds that may end before their quorum is there."""

from __future__ import annotations

from collections.abc import Iterable

from quorate.events import Action
from quorate.policies._rounds import RoundPolicy


class TimedRoundPolicy(RoundPolicy):
    """A round closes at its quorum or, with the arrivals that it needs at least, when its timer comes.

    Timers have the version as their key. Subclasses set them, and reset `_time_is_up` when a round opens.
    """

    def _reset(self, workers: int) -> None:
        super()._reset(workers)
        self._time_is_up = False

    def _timer(self, time: float, key: int) -> Iterable[Action]:
        if key != self._version:
            return []  # that round is over
        self._time_is_up = True
        return self._close(time) if self._complete() else []

    def _complete(self) -> bool:
        # With nobody at work, nobody else can arrive: there is nothing to wait for, time or not.
        over = (self._time_is_up or not self._busy) and not self._pinned
        return (over and len(self._arrivals) >= self.needed) or super()._complete()
