"""When the gradients of a round arrive."""

from __future__ import annotations

from typing import Any

from quorate.metrics import KthArrivals
from quorate.trace import Update


class WholeRounds(KthArrivals):
    """Arrival times of the rounds that every worker took part in.

    The last round of an epoch takes what is left; its second arrival may be its last, and says nothing of others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._workers = 0

    def run(self, header: dict[str, Any]) -> None:
        super().run(header)
        self._workers = header["workers"]

    def applied(self, time: float, update: Update) -> None:
        if len(update.tickets) < self._workers:
            for times in self.times[: self._place]:
                times.pop()
        super().applied(time, update)
        while self.times and not self.times[-1]:
            self.times.pop()
