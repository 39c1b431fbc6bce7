"""Replays a trace: the same events must give the same decisions and the same parameters."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quorate.coordinator import DATA_USED_UP, LIMIT_REACHED, REBOUND
from quorate.engines.base import Job, Outcome
from quorate.engines.simulated.engine import InProcessEngine
from quorate.engines.simulated.synchronous import BigBatch
from quorate.engines.simulated.vmapped import VmappedGradients
from quorate.errors import BadInput, ReplayMismatch
from quorate.events import (
    WITHDRAWN,
    Abandoned,
    Arrived,
    Event,
    Rebound,
    Refused,
    Ticket,
    Timer,
    Withdrawn,
    WorkerJoined,
    WorkerLost,
)
from quorate.learner import Learning
from quorate.ledger import Ledger, Loan
from quorate.noise import Norms
from quorate.run import Limits, Result, RunOptions, run
from quorate.stopping import RecordedStop
from quorate.task import bind_task, recorded_task
from quorate.trace import LineRecorder, norms_of, parts_of, read_header, read_trace, read_whole_header
from quorate.user_code import recorded_policy

#: Fields that only a run with gradients has.
_LEARNED = ("loss", "norm")
#: Fields that traces of schema 1 do not have.
_NOISE = ("norms", "noise_scale")


class ReplayedEngine(InProcessEngine):
    """Gives the events of a trace, in their order and at their times; gradients are computed again."""

    name = "replayed"

    def __init__(self, path: Path, header: dict[str, Any], stop: RecordedStop | None, device: str) -> None:
        super().__init__(device, header["parameter_bytes"])
        self.workers = header["workers"]
        self._path, self._header = path, header
        self.stop = stop
        self._threads_before: int | None = None
        self._tickets: dict[int, Ticket] = {}
        self._records = read_trace(path)
        self._ahead: deque[dict[str, Any]] = deque()  # records read before their turn
        self._arrived: dict[int, Ticket] = {}
        self._cancelled: dict[int, Ticket] = {}
        self._version = 0
        self._times: deque[float] = deque()  # when the recorded run had made the version, and when it went on

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "device": str(self.device), "arithmetic": self.arithmetic}

    def open(self, job: Job) -> None:
        recorded = self._header["engine"].get("arithmetic")
        self.graphs = self._header["engine"].get("graphs", True)  # a loss may not fit into a CUDA graph
        threads = self._header["engine"].get("threads")  # of each worker; another number rounds differently
        if threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(threads)
        self._open_model(
            job, together=recorded in (BigBatch.arithmetic, VmappedGradients.arithmetic), arithmetic=recorded
        )
        if self.arithmetic is not None and recorded is not None and self.arithmetic != recorded:
            raise BadInput(f"the trace was made with {recorded} gradients, this task gives {self.arithmetic} ones")
        self._ledger = job.ledger
        if isinstance(job.ledger, ResumedLedger):
            job.ledger.resumes_next = self._resumes_next

    def now(self, time: float) -> float:
        return self._times.popleft() if self._times else time

    def close(self) -> None:
        super().close()
        self._records.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def start(self, ticket: Ticket) -> None:
        self._tickets[ticket.id] = ticket
        if self._strategy is not None:
            self._strategy.started(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._cancelled[ticket.id] = self._tickets.pop(ticket.id)
        if self._strategy is not None:
            self._strategy.ended(ticket)

    def set_timer(self, at: float, key: int) -> None:
        pass  # the trace has the timer's event

    def next_event(self, until: float | None) -> Event | None:
        while (record := self._ahead.popleft() if self._ahead else next(self._records, None)) is not None:
            event = self._event(record)
            if event is not None:
                return event
        if self.stop is None:
            raise ReplayMismatch(f"{self._path}: the trace is over, but the replay waits for another event")
        return None

    def _upcoming(self) -> Iterator[dict[str, Any]]:
        """The records that follow, read ahead of their turn."""
        yield from self._ahead
        for record in self._records:
            self._ahead.append(record)
            yield record

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None, reason: str) -> Outcome:
        refused, apply_s, norms = self._look_ahead()
        if self._strategy is not None:
            return super().apply(tickets, weights, reason)._replace(apply_s=apply_s)
        return Outcome(None, None, tuple(ticket for ticket in tickets if ticket.id in refused), apply_s, norms)

    def _look_ahead(self) -> tuple[set[int], float | None, Norms | None]:
        """The recorded facts of the update that is about to be made: refused tickets, `apply_s` and norms.

        Its times go to `_times`. Tickets that were refused only when applied stand before the update in the trace.
        """
        self._version += 1
        refused: set[int] = set()
        apply_s: float | None = None
        norms: Norms | None = None
        applied = went_on = False
        for record in self._upcoming():
            if not applied and record["event"] == "refuse":
                refused.add(record["ticket"])
            elif not applied and record["event"] == "apply":
                if record["version"] != self._version:  # an earlier update, whose record still waits for its turn
                    refused.clear()
                    continue
                applied, apply_s, norms = True, record.get("apply_s"), norms_of(record)
                self._times.append(record["time"])
            elif applied and record["event"] != "evaluate":
                if not went_on:
                    self._times.append(record["time"])
                went_on = True
                if record["event"] != "resume":
                    break
                self._ledger.epochs = record["epochs"]  # the policy's remaining actions run under the new limits
        return refused, apply_s, norms

    def _resumes_next(self) -> bool:
        """Whether the recorded run, at the end of its epochs, was resumed with more of them."""
        for record in self._upcoming():
            # With the same epochs, the resumed run was only brought to its end.
            if record["event"] == "resume" and record["epochs"] != self._ledger.epochs:
                self._ledger.epochs = record["epochs"]
                return True
        return False

    def _event(self, record: dict[str, Any]) -> Event | None:
        kind = record["event"]
        if kind == "resume":
            self._ledger.epochs = record["epochs"]
        if kind == "arrive":
            ticket = self._take(record, self._tickets)
            self._arrived[ticket.id] = ticket
            if self._strategy is not None and not self._strategy.arrived(ticket):
                return Refused(record["time"], ticket)
            return Arrived(record["time"], ticket, parts_of(record))
        if kind == "refuse" and record["ticket"] not in self._arrived:  # else it was refused when applied
            ticket = self._take(record, self._tickets)
            if self._strategy is not None:
                self._strategy.arrived(ticket)
            return Refused(record["time"], ticket)
        if kind in ("apply", "drop"):
            used = [self._arrived.pop(number, None) for number in record.get("tickets", (record.get("ticket"),))]
            if kind == "drop" and record["reason"] == WITHDRAWN and used[0] is not None:
                return Withdrawn(record["time"], used[0])
        if kind == "end" and self.stop is not None:
            self.stop.reached = True
        if kind == "abandon":
            return Abandoned(record["time"], self._take(record, self._cancelled), record["cancel_s"])
        if kind == "cancel" and record["reason"] == REBOUND and record["ticket"] in self._tickets:
            return Rebound(record["time"], self._tickets[record["ticket"]])
        if kind == "join":
            return WorkerJoined(record["time"], record["worker"])
        if kind == "lost":
            for number in record["tickets"]:
                ended = self._tickets.pop(number, None)
                if ended is not None and self._strategy is not None:
                    self._strategy.ended(ended)
            return WorkerLost(record["time"], record["worker"], tuple(record["tickets"]))
        return Timer(record["time"], record["key"]) if kind == "timer" else None

    def _take(self, record: dict[str, Any], tickets: dict[int, Ticket]) -> Ticket:
        ticket = tickets.pop(record["ticket"], None)
        if ticket is None:
            raise ReplayMismatch(
                f"{self._path}: the replay differs from the trace: the trace goes on with {json.dumps(record)}, "
                f"but that ticket is not under way in the replay"
            )
        return ticket


class ResumedLedger(Ledger):
    """A ledger with the epochs of the recorded run, which may have been resumed with more."""

    resumes_next: Callable[[], bool]  # called when the data is used up; sets the epochs if the run was resumed

    @property
    def finished(self) -> bool:
        return super().finished and not self.resumes_next()


#: Value of "batches" in a header, if only the trace knows which worker had which batch.
RECORDED = "recorded"


class RecordedLedger(Ledger):
    """Lends each worker the batch that the trace says it had.

    If workers take batches as they need them, the assignment depends on when they asked. The trace does not have
    those times, but it has the assignment.
    """

    def __init__(self, path: Path, samples: int | None, batch_size: int, seed: int) -> None:
        super().__init__(samples, batch_size, None, seed)
        self._records = read_trace(path)
        self._following: dict[str, Any] | None = None

    def borrow(self, round: int | None, worker: int | None = None) -> Loan | None:
        record = self._next_loan()
        if record is None or record["worker"] != worker:
            said = "ends" if record is None else f"goes on with worker {record['worker']}"
            raise ReplayMismatch(f"the replay starts worker {worker} where the trace {said}")
        if record["event"] == "exhausted":
            return None
        self._following = self._next_loan()
        pinned = self._following is not None and self._following["event"] == "pin"
        if pinned:
            self._following = None
        return Loan(record["batch"], record["samples"], pinned)

    def _next_loan(self) -> dict[str, Any] | None:
        if self._following is not None:
            record, self._following = self._following, None
            return record
        return next((record for record in self._records if record["event"] in ("start", "exhausted", "pin")), None)

    def close(self) -> None:
        self._records.close()


class Comparison(LineRecorder):
    """Compares every line of a run with the recorded one, and raises at the first difference."""

    def __init__(self, path: Path, gradients: bool) -> None:
        self._path, self._gradients = path, gradients
        unknown = _NOISE if read_header(path)["schema"] < 2 else ()
        self._left_out = ("core_wait_s", *unknown, *(() if gradients else (*_LEARNED, "digest")))
        self._recorded = self._lines_to_match(path)
        self.lines = 0

    def _lines_to_match(self, path: Path) -> Generator[dict[str, Any]]:
        for record in read_trace(path):
            if record["event"] not in ("run", "resume") and (self._gradients or record["event"] != "evaluate"):
                yield record

    def close(self) -> None:
        self._recorded.close()

    def run(self, header: dict[str, Any]) -> None:
        pass  # the header describes another engine than the recorded one

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        pass  # the events that follow from a resume are in the trace, and are compared

    def _write(self, line: str) -> None:
        self.lines += 1
        here = json.loads(line)
        there = next(self._recorded, None)
        if there is None:
            raise ReplayMismatch(f"{self._path}: the trace is over, but the replay goes on with {line.strip()}")
        for key in self._left_out:
            here.pop(key, None)
            there.pop(key, None)
        # Through text, so that NaN equals NaN.
        if json.dumps(here, sort_keys=True) != json.dumps(there, sort_keys=True):
            raise ReplayMismatch(
                f"{self._path}: the replay differs from the trace at record {self.lines}:\n"
                f"  recorded: {json.dumps(there)}\n  replayed: {json.dumps(here)}"
            )


@dataclass(frozen=True)
class Replay:
    """A replay that agreed with its trace, line by line."""

    result: Result
    lines: int  # records compared
    gradients: bool  # whether parameters were computed and compared too

    def __repr__(self) -> str:
        return f"Replay({self._sentence()}; {self.result!r})"

    def _repr_html_(self) -> str:
        return f"<p>{self._sentence()}</p>{self.result._repr_html_()}"

    def _sentence(self) -> str:
        return f"{self.lines:,} records agree, {'parameters' if self.gradients else 'decisions alone'} compared"


def replay(
    path: str | Path,
    task: Any = None,
    *,
    policy: Any = None,
    gradients: bool | None = None,
    device: str | None = None,
) -> Replay:
    """Re-run a trace (or the folder of a run); raises `ReplayMismatch` if decisions or numbers differ.

    The task and the policy's class are the recorded ones unless given. `gradients=False` checks only the decisions.
    """
    path = Path(path)
    header = read_whole_header(path)
    end = deque(read_trace(path), maxlen=1)[0]
    had_gradients = header["task"] is not None
    gradients = had_gradients if gradients is None else gradients
    if gradients and not had_gradients:
        raise BadInput(f"{str(path)!r} was recorded without gradients, so there are none to compare")
    bound = None
    if gradients:
        bound = bind_task(recorded_task(header) if task is None else task, header["batch_size"])
        if bound.samples() != header["samples"]:
            raise BadInput(
                f"the trace was made with {header['samples']} samples, but the task has {bound.samples()}; "
                f"give the task it was made with"
            )
    data = header["samples"], header["batch_size"]
    recorded = RecordedLedger(path, *data, header["seed"]) if header.get("batches") == RECORDED else None
    job = Job(
        task=bound,
        policy=recorded_policy(header["policy"], policy),
        ledger=recorded or ResumedLedger(*data, header["epochs"], header["seed"]),
        learning=Learning(**header["learning"]),
        seed=header["seed"],
    )
    stop = None if end["reason"] in (LIMIT_REACHED, DATA_USED_UP) else RecordedStop(end["reason"])
    limits = Limits(
        updates=end["version"] if end["reason"] == LIMIT_REACHED else None if stop is None else end["version"] + 1,
        epochs=header["epochs"],
        evaluate_every=header["evaluate_every"],
    )
    recorded_on = header["engine"].get("device") if gradients else None  # decisions need no device
    engine = ReplayedEngine(path, header, stop, device or recorded_on or "cpu")
    comparison = Comparison(path, gradients)
    options = RunOptions(patience_s=math.inf, recorders=(comparison,), stop=engine.stop)
    try:
        result = run(job, engine, limits, None, options)
    finally:
        if recorded is not None:
            recorded.close()
    return Replay(result, comparison.lines, gradients)
