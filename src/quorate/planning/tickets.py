"""Reads from a trace every ticket's time, and when rounds opened and closed."""

from __future__ import annotations

from typing import Any

from quorate.events import Parts, Ticket
from quorate.trace import Recorder, Update, own_seconds, works_ahead

#: Policies whose workers do not start together: their tickets have no rounds.
WITHOUT_ROUNDS = ("async", "softsync", "bounded", "delayed")


class TicketTimes(Recorder):
    """Lists of equal length, one entry a ticket; and by version, when its round opened, filled and closed."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.worker: list[int] = []
        self.version: list[int] = []
        self.started_s: list[float] = []
        self.seconds: list[float | None] = []  # None: lost, or still under way
        self.observed: list[bool] = []  # False: it ended early and would have taken longer
        self.parts: dict[int, Parts] = {}  # place in these lists -> where the time went
        self.opened_s: dict[int, float] = {}  # version -> when its first ticket started
        self.filled_s: dict[int, float] = {}  # version -> when the last gradient came that its round took
        self.updates = 0
        self.ended_s = 0.0
        self.noise_scales: list[float] = []  # as training went on
        self._place: dict[int, int] = {}  # open ticket -> its place

    def run(self, header: dict[str, Any]) -> None:
        self.header = header

    def started(self, time: float, ticket: Ticket) -> None:
        self._place[ticket.id] = len(self.worker)
        self.worker.append(ticket.worker)
        self.version.append(ticket.version)
        self.started_s.append(time)
        self.seconds.append(None)
        self.observed.append(False)
        self.opened_s.setdefault(ticket.version, time)

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        place = self._ends(time, ticket, observed=True)
        if parts is not None:
            self.parts[place] = parts
            self.seconds[place] = own_seconds(self.seconds[place] or 0.0, parts, works_ahead(self.header))

    def refused(self, time: float, ticket: Ticket) -> None:
        if not self.observed[self._place[ticket.id]]:
            self._ends(time, ticket, observed=True)

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        self._ends(time, ticket, observed=False)

    def applied(self, time: float, update: Update) -> None:
        self.updates = update.version
        self.ended_s = time
        if update.tickets:
            places = [self._place.pop(ticket.id) for ticket in update.tickets]
            self.filled_s[update.version - 1] = max(self.started_s[p] + (self.seconds[p] or 0.0) for p in places)
        if update.noise_scale is not None:
            self.noise_scales.append(update.noise_scale)

    def _ends(self, time: float, ticket: Ticket, observed: bool) -> int:
        place = self._place[ticket.id]
        self.seconds[place] = time - self.started_s[place]
        self.observed[place] = observed
        return place
