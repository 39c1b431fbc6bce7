"""A small run whose numbers are known by hand."""

from __future__ import annotations

from typing import Any

from quorate.events import Parts, Ticket
from quorate.trace import Recorder, Update

from .conftest import HEADER


def begin(trace: Recorder, **header: Any) -> None:
    """Three workers come, and each starts on version 0."""
    trace.run({**HEADER, **header})
    for worker in range(3):
        trace.joined(0.0, worker, 0)


def round_of(trace: Recorder, version: int, loss: float = 1.0) -> None:
    """From version to version + 1 in one second: worker 0 after 0.25 s, worker 1 after 1 s, worker 2 is cancelled."""
    start = float(version)
    tickets = [Ticket(3 * version + worker, worker, 0, version, 3 * version + worker, 4) for worker in range(3)]
    for ticket in tickets:
        trace.started(start, ticket)
    trace.arrived(start + 0.25, tickets[0], None)
    trace.arrived(start + 1.0, tickets[1], None)
    trace.applied(start + 1.0, Update(version + 1, tuple(tickets[:2]), None, "quorum", loss, None))
    trace.cancelled(start + 1.0, tickets[2], "late: its version is over")
    trace.evaluated(start + 1.0, version + 1, {"accuracy": 0.5 + 0.01 * version})


def full_round(trace: Recorder, version: int, seconds: dict[int, float]) -> None:
    """An update of every worker's gradient; a round takes as long as the slowest, 2.2 s at most."""
    start = 2.2 * version
    tickets = [Ticket(3 * version + worker, worker, 0, version, 3 * version + worker, 4) for worker in seconds]
    for ticket in tickets:
        trace.started(start, ticket)
    for ticket in sorted(tickets, key=lambda ticket: seconds[ticket.worker]):
        took = seconds[ticket.worker]
        trace.arrived(start + took, ticket, Parts(0.0, took, 0.0))
    trace.applied(start + max(seconds.values()), Update(version + 1, tuple(tickets), None, "all", 1.0, None))


def end(trace: Recorder, version: int, at: float | None = None) -> None:
    trace.ended(float(version) if at is None else at, version, "limit reached", None)
