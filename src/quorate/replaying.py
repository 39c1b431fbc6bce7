"""Run a recorded trace again: the same events must give the same decisions, and the same parameters."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quorate.coordinator import DATA_USED_UP, LIMIT_REACHED, REBOUND
from quorate.engines._abreast import Abreast
from quorate.engines._in_process import InProcessEngine
from quorate.engines._together import Together
from quorate.engines.base import Job, Outcome
from quorate.errors import BadInput, ReplayMismatch
from quorate.events import Abandoned, Arrived, Event, Rebound, Refused, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.learner import Learning
from quorate.ledger import Ledger, Loan
from quorate.limits import Limits
from quorate.noise import Norms
from quorate.policies import make_policy
from quorate.running import Manner, Result, run
from quorate.stopping import RecordedStop
from quorate.task import bind_task
from quorate.trace import LineRecorder, norms_of, parts_of, read_header, read_trace

#: What only a run with gradients knows.
_LEARNED = ("loss", "norm")
#: What traces of schema 1 do not say.
_NOISE = ("norms", "noise_scale")


#: What a header must say for a replay.
_HEADER = [
    "policy",
    "engine",
    "task",
    "workers",
    "seed",
    "samples",
    "batch_size",
    "learning",
    "epochs",
    "evaluate_every",
    "parameter_bytes",
]


class Replayed(InProcessEngine):
    """Gives the events of a trace, in their order and at their times; gradients are computed anew."""

    name = "replayed"

    def __init__(self, path: Path, header: dict[str, Any], stop: RecordedStop | None, device: str) -> None:
        super().__init__(device, header["parameter_bytes"])
        self.workers = header["workers"]
        self._path, self._header = path, header
        self.stop = stop
        self._threads_before: int | None = None
        self._tickets: dict[int, Ticket] = {}
        self._records: Generator[dict[str, Any]] | None = None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "device": str(self.device), "arithmetic": self.arithmetic}

    def open(self, job: Job) -> None:
        recorded = self._header["engine"]["arithmetic"]
        self.graphs = self._header["engine"].get("graphs", True)  # a loss may be one that cannot be recorded
        threads = self._header["engine"].get("threads")  # of each worker; another number rounds differently
        if threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(threads)
        self._open_model(job, together=recorded in (Together.arithmetic, Abreast.arithmetic), arithmetic=recorded)
        if self.arithmetic is not None and recorded is not None and self.arithmetic != recorded:
            raise BadInput(f"the trace was made with {recorded} gradients, this task gives {self.arithmetic} ones")
        self._records = read_trace(self._path)
        self._ahead: deque[dict[str, Any]] = deque()  # read before their turn
        self._arrived: set[int] = set()
        self._cancelled: dict[int, Ticket] = {}
        self._version = 0
        self._times: deque[float] = deque()  # when the recorded run had made the version, and when it went on

    def now(self, time: float) -> float:
        return self._times.popleft() if self._times else time

    def close(self) -> None:
        super().close()
        if self._records is not None:
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
            self._strategy.ended(ticket, arrived=False)

    def set_timer(self, at: float, key: int) -> None:
        pass  # the trace says when it came

    def next_event(self, until: float | None) -> Event | None:
        while (record := self._next_record()) is not None:
            event = self._event(record)
            if event is not None:
                return event
        return None

    def _next_record(self) -> dict[str, Any] | None:
        return self._ahead.popleft() if self._ahead else self._read_on()

    def _read_on(self) -> dict[str, Any] | None:
        assert self._records is not None
        return next(self._records, None)

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        refused, apply_s, norms = self._look_ahead()
        if self._strategy is not None:
            return super().apply(tickets, weights)._replace(apply_s=apply_s)
        return Outcome(None, None, tuple(ticket for ticket in tickets if ticket.id in refused), apply_s, norms)

    def _look_ahead(self) -> tuple[set[int], float | None, Norms | None]:
        """What the trace says of the update that is about to be made: gradients left out, and its times.

        Without gradients, what was found not to be finite only when applied stands before the update.
        """
        self._version += 1
        refused: set[int] = set()
        apply_s: float | None = None
        norms: Norms | None = None
        applied = False
        place = 0
        while True:
            if place == len(self._ahead):
                following = self._read_on()
                if following is None:
                    break
                self._ahead.append(following)
            record = self._ahead[place]
            place += 1
            if not applied and record["event"] == "refuse":
                refused.add(record["ticket"])
            elif not applied and record["event"] == "apply":
                if record["version"] != self._version:  # one before it that nobody has read past yet
                    refused.clear()
                    continue
                applied, apply_s, norms = True, record.get("apply_s"), norms_of(record)
                self._times.append(record["time"])
            elif applied and record["event"] != "evaluate":
                self._times.append(record["time"])
                break
        return refused, apply_s, norms

    def _event(self, record: dict[str, Any]) -> Event | None:
        kind = record["event"]
        if kind == "arrive":
            ticket = self._take(record)
            self._arrived.add(ticket.id)
            if self._strategy is not None and not self._strategy.arrived(ticket):
                return Refused(record["time"], ticket)
            return Arrived(record["time"], ticket, parts_of(record))
        if kind == "refuse" and record["ticket"] not in self._arrived:  # else found out only when applied
            ticket = self._take(record)
            if self._strategy is not None:
                self._strategy.arrived(ticket)
            return Refused(record["time"], ticket)
        if kind in ("apply", "drop"):
            self._arrived.difference_update(record.get("tickets", (record.get("ticket"),)))
        if kind == "end" and self.stop is not None:
            self.stop.reached = True
        if kind == "abandon":
            return Abandoned(record["time"], self._cancelled.pop(record["ticket"]), record["cancel_s"])
        if kind == "cancel" and record["reason"] == REBOUND and record["ticket"] in self._tickets:
            return Rebound(record["time"], self._tickets[record["ticket"]])
        if kind == "join":
            return WorkerJoined(record["time"], record["worker"])
        if kind == "lost":
            for number in record["tickets"]:
                ended = self._tickets.pop(number, None)
                if ended is not None and self._strategy is not None:
                    self._strategy.ended(ended, arrived=False)
            return WorkerLost(record["time"], record["worker"], tuple(record["tickets"]))
        return Timer(record["time"], record["key"]) if kind == "timer" else None

    def _take(self, record: dict[str, Any]) -> Ticket:
        ticket = self._tickets.pop(record["ticket"], None)
        if ticket is None:
            raise ReplayMismatch(f"ticket {record['ticket']} arrives in the trace, but was not in flight here")
        return ticket


#: What a header's "batches" says where the trace alone knows who had which batch.
RECORDED = "recorded"


class RecordedLedger(Ledger):
    """Lends what the trace says was lent.

    Where workers take batches as they need them, which one was whose depends on when they asked; that is not in the
    trace, but what came of it is.
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
        """Let go of the trace."""
        self._records.close()


class Comparison(LineRecorder):
    """Holds every line of a run against the recorded one, and stops at the first difference."""

    def __init__(self, path: Path, gradients: bool) -> None:
        self._path, self._gradients = path, gradients
        unknown = _NOISE if read_header(path)["schema"] < 2 else ()
        self._left_out = unknown if gradients else (*_LEARNED, "digest", *unknown)
        self._recorded = self._lines_to_match(path)
        self.lines = 0

    def _lines_to_match(self, path: Path) -> Generator[dict[str, Any]]:
        for record in read_trace(path):
            if record["event"] not in ("run", "resume") and (self._gradients or record["event"] != "evaluate"):
                yield record

    def close(self) -> None:
        self._recorded.close()

    def run(self, header: dict[str, Any]) -> None:
        pass  # describes the engine, which is another one here

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        pass  # what follows from it is in the trace, event by event

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


def replay(path: str | Path, task: Any = None, *, gradients: bool | None = None, device: str | None = None) -> Replay:
    """Re-run a trace (or the folder of a run); raises `ReplayMismatch` where decisions or numbers differ.

    The task is the recorded one unless given. `gradients=False` checks the decisions alone.
    """
    path = Path(path)
    header: dict[str, Any] = {}
    end: dict[str, Any] = {}
    for record in read_trace(path):
        header = header or record
        end = record
        if record["event"] == "resume" and record["epochs"] != header["epochs"]:
            raise BadInput(
                f"{str(path)!r} was resumed with {record['epochs']} epochs instead of {header['epochs']}: "
                f"what was decided where the first ones ended cannot be decided again"
            )
    missing = [key for key in _HEADER if key not in header] + [key for key in ("version", "reason") if key not in end]
    if missing:
        raise BadInput(f"{str(path)!r} is not a whole quorate trace: it does not say its {', '.join(missing)}")
    had_gradients = header["task"] is not None
    gradients = had_gradients if gradients is None else gradients
    if gradients and not had_gradients:
        raise BadInput(f"{str(path)!r} was recorded without gradients, so there are none to compare")
    bound = None
    if gradients:
        bound = bind_task(task if task is not None else header["task"], header["batch_size"])
        if bound.samples() != header["samples"]:
            raise BadInput(
                f"the trace was made with {header['samples']} samples, but the task has {bound.samples()}; "
                f"give the task it was made with"
            )
    options = dict(header["policy"])
    policy = make_policy(options.pop("name"), **options)
    data = header["samples"], header["batch_size"]
    recorded = RecordedLedger(path, *data, header["seed"]) if header.get("batches") == RECORDED else None
    job = Job(
        task=bound,
        policy=policy,
        ledger=recorded or Ledger(*data, header["epochs"], header["seed"]),
        learning=Learning(**header["learning"]),
        seed=header["seed"],
    )
    stop = None if end["reason"] in (LIMIT_REACHED, DATA_USED_UP) else RecordedStop(end["reason"])
    limits = Limits(
        updates=end["version"] if end["reason"] == LIMIT_REACHED else None if stop is None else end["version"] + 1,
        epochs=header["epochs"],
        evaluate_every=header["evaluate_every"],
    )
    recorded_on = header["engine"].get("device") if gradients else None  # decisions can be looked at anywhere
    engine = Replayed(path, header, stop, device or recorded_on or "cpu")
    comparison = Comparison(path, gradients)
    manner = Manner(patience_s=math.inf, recorders=(comparison,), stop=engine.stop)
    try:
        result = run(job, engine, limits, None, manner)
    finally:
        if recorded is not None:
            recorded.close()
    return Replay(result, comparison.lines, gradients)
