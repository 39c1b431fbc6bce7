"""The append-only record of what happened: one event a line, times in seconds, sizes in bytes.

Everything shown or planned is computed from a trace. `Recorder` is the list of things that can happen, as
methods; the coordinator calls them while a run goes on, and `feed` calls them again from a file. A line of a
trace is one JSON object with the key "event"; the first is the header ("run"), the last is "end".
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from quorate.errors import BadInput
from quorate.events import Parts, Ticket
from quorate.noise import Norms
from quorate.schema import SCHEMA, why_not_readable

TRACE_FILE = "trace.jsonl"
#: Cancelled tickets that are remembered. A simulated worker never says a last word; a real one says it soon.
_LAST_WORDS = 100_000


class Update(NamedTuple):
    """A version, and what made it."""

    version: int
    tickets: tuple[Ticket, ...]  # in the order in which their gradients were summed
    weights: tuple[float, ...] | None
    reason: str
    loss: float | None  # None without gradients
    norm: float | None  # of the averaged gradient before clipping, where it was computed
    apply_s: float | None = None  # how long it took to make, where time is real
    norms: Norms | None = None  # on versions where they are taken
    noise_scale: float | None = None  # in samples: what is known of it after these norms


class Recorder:
    """What can happen in a run. Every method does nothing here; subclasses keep what they need."""

    def run(self, header: dict[str, Any]) -> None:
        """The run begins; `header` says what it is."""

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        """A worker came, or came back as a new incarnation."""

    def started(self, time: float, ticket: Ticket) -> None:
        """A worker began a ticket."""

    def exhausted(self, time: float, worker: int) -> None:
        """A worker was to begin a ticket, but there was no batch for it."""

    def pinned(self, time: float, ticket: Ticket) -> None:
        """The ticket just started holds a batch that its round must wait for."""

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        """A ticket's gradient is there."""

    def refused(self, time: float, ticket: Ticket) -> None:
        """A ticket's gradient held NaN or Inf; the ticket ends as dropped."""

    def applied(self, time: float, update: Update) -> None:
        """Arrivals made a version."""

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        """A finished ticket will not be used."""

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        """A ticket was abandoned before it was finished; it ends as dropped."""

    def abandoned(self, time: float, ticket: Ticket, cancel_s: float) -> None:
        """A worker noticed that a ticket was cancelled, so long after it was."""

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        """A worker is gone, and these tickets with it."""

    def timer_set(self, time: float, at: float, key: int, reason: str) -> None:
        """The policy asked to be woken."""

    def timer(self, time: float, key: int) -> None:
        """It was woken."""

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        """The policy chose how many arrivals make a version, from the round on that follows this version."""

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        """The task measured a version."""

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        """The run is over; tickets that were still open have been dropped."""

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        """The run goes on from a checkpoint; every worker of before is lost, which is told next."""

    def close(self) -> None:
        """Release what is held; also called when a run breaks off."""


@lru_cache(maxsize=1024)
def _quoted(reason: str) -> str:
    return json.dumps(reason)


class LineRecorder(Recorder):
    """Makes a line of everything. Formatted by hand: with two or three a ticket, an encoder would dominate."""

    def _write(self, line: str) -> None:
        raise NotImplementedError

    def run(self, header: dict[str, Any]) -> None:
        self._write(json.dumps({"event": "run", "schema": SCHEMA, **header}) + "\n")

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        self._write(f'{{"event":"join","time":{time!r},"worker":{worker},"incarnation":{incarnation}}}\n')

    def started(self, time: float, ticket: Ticket) -> None:
        number, worker, incarnation, version, batch, samples = ticket
        self._write(
            f'{{"event":"start","time":{time!r},"ticket":{number},"worker":{worker},"incarnation":{incarnation},'
            f'"version":{version},"batch":{batch},"samples":{samples}}}\n'
        )

    def exhausted(self, time: float, worker: int) -> None:
        self._write(f'{{"event":"exhausted","time":{time!r},"worker":{worker}}}\n')

    def pinned(self, time: float, ticket: Ticket) -> None:
        self._write(f'{{"event":"pin","time":{time!r},"ticket":{ticket.id}}}\n')

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        if parts is None:
            self._write(f'{{"event":"arrive","time":{time!r},"ticket":{ticket[0]}}}\n')
            return
        data_s, compute_s, transfer_s = parts
        self._write(
            f'{{"event":"arrive","time":{time!r},"ticket":{ticket[0]},"data_s":{data_s!r},'
            f'"compute_s":{compute_s!r},"transfer_s":{transfer_s!r}}}\n'
        )

    def refused(self, time: float, ticket: Ticket) -> None:
        self._write(f'{{"event":"refuse","time":{time!r},"ticket":{ticket.id}}}\n')

    def applied(self, time: float, update: Update) -> None:
        version, tickets, weights, reason, loss, norm, apply_s, norms, noise_scale = update
        numbers = ",".join([str(ticket[0]) for ticket in tickets])
        scaled = "" if weights is None else f',"weights":{list(weights)!r}'
        learned = "" if loss is None else f',"loss":{loss!r},"norm":{json.dumps(norm)}'
        took = "" if apply_s is None else f',"apply_s":{apply_s!r}'
        noise = "" if norms is None else f',"norms":{list(norms)!r},"noise_scale":{json.dumps(noise_scale)}'
        self._write(
            f'{{"event":"apply","time":{time!r},"version":{version},"tickets":[{numbers}]{scaled},'
            f'"reason":{_quoted(reason)}{learned}{took}{noise}}}\n'
        )

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        self._write(f'{{"event":"drop","time":{time!r},"ticket":{ticket[0]},"reason":{_quoted(reason)}}}\n')

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        self._write(f'{{"event":"cancel","time":{time!r},"ticket":{ticket[0]},"reason":{_quoted(reason)}}}\n')

    def abandoned(self, time: float, ticket: Ticket, cancel_s: float) -> None:
        self._write(
            f'{{"event":"abandon","time":{time!r},"ticket":{ticket[0]},"worker":{ticket[1]},"cancel_s":{cancel_s!r}}}\n'
        )

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        numbers = ",".join([str(ticket.id) for ticket in tickets])
        self._write(f'{{"event":"lost","time":{time!r},"worker":{worker},"tickets":[{numbers}]}}\n')

    def timer_set(self, time: float, at: float, key: int, reason: str) -> None:
        self._write(f'{{"event":"set-timer","time":{time!r},"at":{at!r},"key":{key},"reason":{_quoted(reason)}}}\n')

    def timer(self, time: float, key: int) -> None:
        self._write(f'{{"event":"timer","time":{time!r},"key":{key}}}\n')

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        record = {"event": "choose", "time": time, "version": version, "quorum": quorum, "reason": reason}
        self._write(json.dumps(record) + "\n")

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        record = {"event": "evaluate", "time": time, "version": version, "measures": measures}
        self._write(json.dumps(record) + "\n")

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        self._write(json.dumps({"event": "resume", "time": time, "version": version, **limits}) + "\n")

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        record = {"event": "end", "time": time, "version": version, "reason": reason, "digest": digest}
        self._write(json.dumps(record) + "\n")


def works_ahead(header: dict[str, Any]) -> bool:
    """Whether workers go on by themselves, ahead of the trace's clock (the collective engine)."""
    return bool((header.get("engine") or {}).get("name") == "collective")


def own_seconds(elapsed_s: float, parts: Parts | None, works_ahead: bool) -> float:
    """How long a ticket took its worker. One that works ahead says so itself; what it waited for others is not its."""
    return parts.data_s + parts.compute_s if works_ahead and parts is not None else elapsed_s


# ---------------------------------------------------------------- reading


def read_lenient(path: Path, left_out: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The whole records of a trace that may be torn; `left_out` is told, in a sentence, if anything is missing."""
    path = trace_file(path)
    ended = False
    number = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = _parse(path, number, line)
            except BadInput:
                if number == 1:
                    raise
                rest = 1 + sum(1 for _ in file)
                left_out(
                    f"{path.name} is torn at line {number}: that line and what follows ({rest} in all) is left out"
                )
                return
            if number == 1:
                _check_header(path, record)
            yield record
            ended = record["event"] == "end"
    if number == 0:
        raise BadInput(f"trace {str(path)!r} is empty; give a trace that quorate wrote")
    if not ended:
        left_out(f"{path.name} stops at line {number} without an end: its run broke off, or still goes on")


def trace_file(path: Path) -> Path:
    """The trace of a run's folder, or the file itself."""
    path = path / TRACE_FILE if path.is_dir() else path
    if not path.is_file():
        raise BadInput(f"trace {str(path)!r} does not exist; give a {TRACE_FILE} or the folder of a run")
    return path


def read_trace(path: Path) -> Generator[dict[str, Any]]:
    """The records of a whole trace, header first. A torn or foreign file is refused, with the line."""
    path = trace_file(path)
    ended = False
    number = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            record = _parse(path, number, line)
            if number == 1:
                _check_header(path, record)
            if ended:
                raise BadInput(f"trace {str(path)!r} goes on after its end, at line {number}; give one run")
            yield record
            ended = record["event"] == "end"
    if number == 0:
        raise BadInput(f"trace {str(path)!r} is empty; give a trace that quorate wrote")
    if not ended:
        raise BadInput(f"trace {str(path)!r} is torn: it stops at line {number} without an end; its run broke off")


def read_header(path: Path) -> dict[str, Any]:
    """The first record of a trace, which may be torn further on."""
    path = trace_file(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        record = _parse(path, 1, file.readline())
    _check_header(path, record)
    return record


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if isinstance(record, dict) and isinstance(record.get("event"), str):
        return record
    if number == 1:
        raise BadInput(
            f"{str(path)!r} is not a quorate trace: its first line is no header; give one that quorate wrote"
        )
    raise BadInput(f"trace {str(path)!r} is torn: line {number} is not a whole record")


def _check_header(path: Path, record: dict[str, Any]) -> None:
    if record["event"] != "run" or "schema" not in record:
        raise BadInput(
            f"{str(path)!r} is not a quorate trace: its first line is no header; give one that quorate wrote"
        )
    wrong = why_not_readable(record["schema"])
    if wrong is not None:
        raise BadInput(f"trace {str(path)!r} {wrong}")


def feed(records: Iterable[dict[str, Any]], recorder: Recorder) -> None:
    """Tell a recorder what a trace says happened."""
    tell = Telling(recorder).tell
    for record in records:
        tell(record)


class Telling:
    """Tells a recorder what a trace says happened, record by record, in memory that does not grow with the run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[int, Ticket] = {}
        self._cancelled: OrderedDict[int, Ticket] = OrderedDict()  # those that a worker may still have a last word on

    def tell(self, record: dict[str, Any]) -> None:
        recorder, open_tickets, cancelled = self._recorder, self._open, self._cancelled
        event = record["event"]
        if event == "run":
            recorder.run({key: value for key, value in record.items() if key not in ("event", "schema")})
            return
        time = record["time"]
        if event == "start":
            ticket = ticket_of(record)
            open_tickets[ticket.id] = ticket
            recorder.started(time, ticket)
        elif event == "arrive":
            recorder.arrived(time, open_tickets[record["ticket"]], parts_of(record))
        elif event == "apply":
            tickets = tuple(open_tickets.pop(number) for number in record["tickets"])
            weights = tuple(record["weights"]) if "weights" in record else None
            learned = record.get("loss"), record.get("norm"), record.get("apply_s")
            noise = norms_of(record), record.get("noise_scale")
            recorder.applied(time, Update(record["version"], tickets, weights, record["reason"], *learned, *noise))
        elif event == "cancel":
            ticket = open_tickets.pop(record["ticket"])
            cancelled[ticket.id] = ticket
            if len(cancelled) > _LAST_WORDS:
                cancelled.popitem(last=False)
            recorder.cancelled(time, ticket, record["reason"])
        elif event == "abandon":
            recorder.abandoned(time, cancelled.pop(record["ticket"]), record["cancel_s"])
        elif event == "drop":
            recorder.dropped(time, open_tickets.pop(record["ticket"]), record["reason"])
        elif event == "refuse":
            recorder.refused(time, open_tickets.pop(record["ticket"]))
        elif event == "lost":
            recorder.lost(time, record["worker"], tuple(open_tickets.pop(number) for number in record["tickets"]))
        elif event == "join":
            recorder.joined(time, record["worker"], record["incarnation"])
        elif event == "exhausted":
            recorder.exhausted(time, record["worker"])
        elif event == "pin":
            recorder.pinned(time, open_tickets[record["ticket"]])
        elif event == "set-timer":
            recorder.timer_set(time, record["at"], record["key"], record["reason"])
        elif event == "timer":
            recorder.timer(time, record["key"])
        elif event == "choose":
            recorder.chose(time, record["version"], record["quorum"], record["reason"])
        elif event == "evaluate":
            recorder.evaluated(time, record["version"], record["measures"])
        elif event == "resume":
            limits = {key: record[key] for key in ("updates", "epochs", "until")}
            recorder.resumed(time, record["version"], limits)
        elif event == "end":
            recorder.ended(time, record["version"], record["reason"], record["digest"])
        else:
            raise BadInput(f"a trace of schema {SCHEMA} has no event {event!r}")


def ticket_of(record: dict[str, Any]) -> Ticket:
    """The ticket of a "start" record."""
    return Ticket(
        record["ticket"],
        record["worker"],
        record["incarnation"],
        record["version"],
        record["batch"],
        record["samples"],
    )


def parts_of(record: dict[str, Any]) -> Parts | None:
    """Where an "arrive" record says the time went."""
    if "compute_s" not in record:
        return None
    return Parts(record["data_s"], record["compute_s"], record["transfer_s"])


def norms_of(record: dict[str, Any]) -> Norms | None:
    """The norms that an "apply" record holds."""
    return Norms(*record["norms"]) if "norms" in record else None
