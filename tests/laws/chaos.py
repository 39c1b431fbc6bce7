"""An engine whose order of events is drawn by the test: any arrival, loss, return or refusal, at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quorate.coordinator import Coordinator
from quorate.engines.base import Engine, Job, Outcome
from quorate.events import Arrived, Event, Refused, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.ledger import Ledger
from quorate.policies import Policy
from quorate.trace import Recorder, Update

MOST_EVENTS = 20_000


class Chaos(Engine):
    """Each number of `choices` picks the next event; when they are used up, all workers are fair and healthy.

    Losing a worker may also take gradients along that had arrived but were not applied yet.
    """

    name = "chaos"

    def __init__(
        self,
        workers: int,
        choices: Sequence[int],
        *,
        lossy: bool = True,
        refusals: bool = False,
        gone: Sequence[int] = (),
    ) -> None:
        self.workers = workers
        self._choices = deque(choices)
        self._lossy, self._refusals = lossy, refusals
        self._time = 0.0
        self._flying: dict[int, Ticket] = {}
        self._held: dict[int, Ticket] = {}  # arrived, not yet applied or dropped
        self._live: dict[int, None] = {}
        self._joining = deque(range(workers))
        self._timers: deque[tuple[float, int]] = deque()
        self._events = 0
        self._to_lose, self._gone = deque(gone), set(gone)  # workers that are lost for good, one by one

    def next_event(self, until: float | None) -> Event | None:
        self._events += 1
        assert self._events < MOST_EVENTS, "no end in sight: the policy makes no progress"
        if self._joining:
            return self._join(self._joining.popleft())
        if self._choices:
            event = self._choose(self._choices.popleft())
            if event is not None:
                return event
        missing = [worker for worker in range(self.workers) if worker not in self._live and worker not in self._gone]
        if missing:
            return self._join(missing[0])
        if self._flying:
            return self._arrive(next(iter(self._flying)))
        if self._timers:
            return self._ring()
        return None

    def _choose(self, choice: int) -> Event | None:
        kind, which = choice % 8, choice // 8
        if self._to_lose and kind in (0, 4):
            return self._lose(self._to_lose.popleft(), with_gradients=which % 2 == 0)
        self._time += (which % 5) * 0.25  # ties included
        if kind == 0 and self._lossy and self._live:
            return self._lose(list(self._live)[which % len(self._live)], with_gradients=which % 2 == 0)
        missing = [
            worker for worker in range(self.workers + 1) if worker not in self._live
        ]  # one worker more than the run has may join
        if kind == 1 and self._lossy and missing:
            return self._join(missing[which % len(missing)])
        if kind == 2 and self._timers:
            return self._ring()
        if not self._flying:
            return None
        worker = list(self._flying)[which % len(self._flying)]
        if kind == 3 and self._refusals:
            return Refused(self._time, self._flying.pop(worker))
        return self._arrive(worker)

    def _join(self, worker: int) -> Event:
        self._live[worker] = None
        return WorkerJoined(self._time, worker)

    def _lose(self, worker: int, with_gradients: bool) -> Event:
        del self._live[worker]
        self._flying.pop(worker, None)
        held = [ticket.id for ticket in self._held.values() if ticket.worker == worker] if with_gradients else []
        for number in held:
            del self._held[number]
        return WorkerLost(self._time, worker, tuple(held))

    def _arrive(self, worker: int) -> Event:
        ticket = self._flying.pop(worker)
        self._held[ticket.id] = ticket
        return Arrived(self._time, ticket)

    def _ring(self) -> Event:
        at, key = self._timers.popleft()
        self._time = max(self._time, at)
        return Timer(self._time, key)

    # ------------------------------------------------------------ the rest of the contract

    def start(self, ticket: Ticket) -> None:
        assert ticket.worker in self._live and ticket.worker not in self._flying
        self._flying[ticket.worker] = ticket

    def cancel(self, ticket: Ticket) -> None:
        del self._flying[ticket.worker]

    def drop(self, ticket: Ticket) -> None:
        del self._held[ticket.id]

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None, reason: str) -> Outcome:
        for ticket in tickets:
            del self._held[ticket.id]
        return Outcome(None, None)

    def set_timer(self, at: float, key: int) -> None:
        self._timers.append((at, key))

    def open(self, job: Job) -> None: ...
    def describe(self) -> dict[str, Any]:
        return {}

    def evaluate(self) -> dict[str, float]:
        return {}

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        return None

    def parameter_bytes(self) -> int:
        return 0

    def close(self) -> None: ...


class Log(Recorder):
    """All decisions of a run, as comparable values."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def started(self, time: float, ticket: Ticket) -> None:
        self.entries.append(("start", time, *ticket))

    def applied(self, time: float, update: Update) -> None:
        numbers = tuple(ticket.id for ticket in update.tickets)
        self.entries.append(("apply", time, update.version, numbers, update.weights))

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        self.entries.append(("choose", time, version, quorum, reason))

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        self.entries.append(("drop", time, ticket.id, reason))

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        self.entries.append(("cancel", time, ticket.id, reason))

    def lost(self, time: float, worker: int, tickets: Any) -> None:
        self.entries.append(("lost", time, worker, tuple(ticket.id for ticket in tickets)))


def run_chaos(
    policy: Policy,
    workers: int,
    choices: Sequence[int],
    recorders: Sequence[Recorder],
    *,
    samples: int = 23,
    batch_size: int = 2,
    epochs: int = 2,
    lossy: bool = True,
    refusals: bool = False,
    gone: Sequence[int] = (),
    ledger: Ledger | None = None,
) -> Ledger:
    """Run a policy to the end of its data through the events that the choices pick."""
    ledger = ledger or Ledger(samples, batch_size, epochs=epochs, seed=7)
    engine = Chaos(workers, choices, lossy=lossy, refusals=refusals, gone=gone)
    coordinator = Coordinator(
        policy,
        engine,
        ledger,
        recorders,
        after_update=lambda version, time, loss: False,
        patience_s=1e9,
    )
    end = coordinator.run()
    for recorder in recorders:
        recorder.ended(end, coordinator.version, "data used up", None)
    return ledger
