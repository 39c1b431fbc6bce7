"""What the engines with real workers have in common towards the coordinator: tickets and time."""

from __future__ import annotations

from time import monotonic
from typing import Any

from quorate.engines.base import Engine, Job, Outcome
from quorate.errors import BadInput
from quorate.events import Event, Ticket


class LiveEngine(Engine):
    """Keeps one open run, which has a `live` (LiveRun), an `updater`, and a `to_close` to give everything back."""

    wire: str
    _open: Any = None

    @property
    def _run(self) -> Any:
        assert self._open is not None, "the engine is not open"
        return self._open

    def _check_job(self, job: Job) -> None:
        """Refuse what real workers cannot be given."""
        if job.task is None:
            raise BadInput(f"the {self.name} engine needs a task to compute gradients of; use the simulated engine")
        if self.wire != "fp32" and job.learning.delay_compensation:
            raise BadInput("delay compensation multiplies small differences, which a 16-bit wire rounds away; use fp32")

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.to_close.close()

    def start(self, ticket: Ticket) -> None:
        self._run.live.begin(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._run.live.cancel(ticket)

    def drop(self, ticket: Ticket) -> None:
        self._run.updater.drop(ticket)

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        began = monotonic()
        outcome: Outcome = self._run.updater.apply(tickets, weights)
        return outcome._replace(apply_s=monotonic() - began)

    def now(self, time: float) -> float:
        now: float = self._run.live.tick()
        return now

    def set_timer(self, at: float, key: int) -> None:
        self._run.live.set_timer(at, key)

    def next_event(self, until: float | None) -> Event | None:
        event: Event | None = self._run.live.next_event(until)
        return event
