"""The append-only trace of a run: one event a line, times in seconds, sizes in bytes.

Reports and plans are computed from traces. `Recorder` has one method for each kind of event; the coordinator calls
them during a run, and `feed` calls them again from a file. A line of a trace is one JSON object with the key "event";
the first is the header ("run"), the last is "end".
"""

from __future__ import annotations

import errno
import json
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from quorate.errors import BadInput
from quorate.events import Parts, Ticket
from quorate.noise import Norms
from quorate.schema import CANCELLED_KEPT, SCHEMA, TO_RUN, TraceCheck, Unfit, parse_lines, why_not_readable

TRACE_FILE = "trace.jsonl"
_HEADER_BYTES = 1 << 20  # no header is longer


class Update(NamedTuple):
    """A version, and the tickets that made it."""

    version: int
    tickets: tuple[Ticket, ...]  # in the order in which their gradients were summed
    weights: tuple[float, ...] | None
    reason: str
    loss: float | None  # None without gradients
    norm: float | None  # of the averaged gradient before clipping, if it was computed
    apply_s: float | None = None  # seconds that the update took, if time is real
    norms: Norms | None = None  # on versions where they are measured
    noise_scale: float | None = None  # in samples: the estimate after these norms


class Recorder:
    """Base class of observers of a run. Every method does nothing here; a subclass overrides those that it needs."""

    def run(self, header: dict[str, Any]) -> None:
        """The run begins; `header` describes it."""

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        """A worker joined, or came back as a new incarnation."""

    def started(self, time: float, ticket: Ticket) -> None:
        """A worker began a ticket."""

    def exhausted(self, time: float, worker: int) -> None:
        """A worker should have started a ticket, but there was no batch for it."""

    def pinned(self, time: float, ticket: Ticket) -> None:
        """The ticket just started holds a batch that its round must wait for."""

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        """A ticket's gradient has arrived."""

    def refused(self, time: float, ticket: Ticket) -> None:
        """A ticket's gradient held NaN or Inf; the ticket ends as dropped."""

    def applied(self, time: float, update: Update) -> None:
        """Arrivals made a version."""

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        """A finished ticket will not be used."""

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        """A ticket was abandoned before it was finished; it ends as dropped."""

    def abandoned(self, time: float, ticket: Ticket, cancel_s: float) -> None:
        """A worker noticed that a ticket was cancelled, `cancel_s` seconds after it was."""

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        """A worker is gone, and these tickets with it."""

    def timer_set(self, time: float, at: float, key: int, reason: str) -> None:
        """The policy set a timer."""

    def timer(self, time: float, key: int) -> None:
        """A timer of the policy fired."""

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        """The policy chose the number of arrivals that make a version, beginning with the round after `version`."""

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        """The task measured a version."""

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        """The run is over; tickets that were still open have been dropped."""

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        """The run continues from a checkpoint. `lost` is called next for every worker that the checkpoint had."""

    def close(self) -> None:
        """Release files and other resources; also called when a run breaks off."""


@lru_cache(maxsize=1024)
def _quoted(reason: str) -> str:
    return json.dumps(reason)


class LineRecorder(Recorder):
    """Writes each event as a line. Frequent lines are formatted by hand: a JSON encoder would dominate the cost."""

    #: Seconds that workers waited for a core, for the last line of the trace; None: not known.
    core_wait_s: float | None = None

    def _write(self, line: str) -> None:
        raise NotImplementedError

    def _write_json(self, event: str, **fields: Any) -> None:
        self._write(json.dumps({"event": event, **fields}) + "\n")

    def run(self, header: dict[str, Any]) -> None:
        self._write_json("run", schema=SCHEMA, **header)

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
        self._write_json("choose", time=time, version=version, quorum=quorum, reason=reason)

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        self._write_json("evaluate", time=time, version=version, measures=measures)

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        self._write_json("resume", time=time, version=version, **limits)

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        waited = {} if self.core_wait_s is None else {"core_wait_s": round(self.core_wait_s, 6)}
        self._write_json("end", time=time, version=version, reason=reason, digest=digest, **waited)


def works_ahead(header: dict[str, Any]) -> bool:
    """Whether workers work ahead of the coordinator's clock, as in the collective engine."""
    return bool((header.get("engine") or {}).get("name") == "collective")


def own_seconds(elapsed_s: float, parts: Parts | None, works_ahead: bool) -> float:
    """Seconds that a worker spent on a ticket. A worker that works ahead measures them: waiting does not count."""
    return parts.data_s + parts.compute_s if works_ahead and parts is not None else elapsed_s


# ---------------------------------------------------------------- reading


def read_lenient(path: Path, left_out: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The complete records of a trace that may be torn; `left_out` gets a sentence if any are missing."""
    return _read(path, left_out)


def read_trace(path: Path) -> Generator[dict[str, Any]]:
    """The records of a complete trace, header first. BadInput, with the line, for a torn, changed or foreign file."""
    return _read(path, None)


def read_until(path: Path, end_bytes: int) -> Generator[dict[str, Any]]:
    """The records in the first `end_bytes` bytes of a trace: those before a checkpoint."""
    return _read(path, None, end_bytes)


def read_header(path: Path) -> dict[str, Any]:
    """The first record of a trace, which may be torn further on."""
    with closing(_read(path, lambda _: None)) as records:
        return next(records)


def read_whole_header(path: Path) -> dict[str, Any]:
    """The header of a trace, with all fields that it takes to replay or resume the run."""
    header = read_header(path)
    missing = [name for name in TO_RUN if name not in header]
    if missing:
        raise BadInput(f"{str(path)!r} is not a whole quorate trace: it does not say its {', '.join(missing)}")
    return header


def trace_file(path: Path) -> Path:
    """The path of a trace, given the path itself or the folder of its run."""
    path = path / TRACE_FILE if path.is_dir() else path
    if not path.is_file():
        raise BadInput(f"trace {str(path)!r} does not exist; give a {TRACE_FILE} or the folder of a run")
    return path


def _read(
    path: Path, left_out: Callable[[str], None] | None, end_bytes: int | None = None
) -> Generator[dict[str, Any]]:
    """The checked records of a trace. If it is torn, `left_out` gets a sentence; without it BadInput is raised."""
    path = trace_file(path)
    check, read_bytes = TraceCheck(), 0
    try:
        opened = path.open("rb")
    except OSError as error:
        raise BadInput(f"trace {str(path)!r} cannot be read: {error.strerror}") from error
    with opened as file:
        for number, line in enumerate(file, start=1):
            read_bytes += len(line)
            if end_bytes is not None and read_bytes > end_bytes:
                if read_bytes - len(line) != end_bytes:
                    raise BadInput(f"trace {str(path)!r} does not fit its checkpoint: it was changed after the run")
                break
            try:
                (record,) = parse_lines(line)
            except ValueError:
                if number == 1:
                    raise foreign(path) from None
                if left_out is None:
                    raise BadInput(f"trace {str(path)!r} is torn: line {number} is not a whole record") from None
                rest = 1 + sum(1 for _ in file)
                left_out(
                    f"{path.name} is torn at line {number}: that line and what follows ({rest} in all) is left out"
                )
                return
            check_next(check, path, record)
            yield record
    if check.records == 0:
        raise BadInput(is_empty(path))
    if check.has_ended or end_bytes is not None:
        return
    if left_out is None:
        raise BadInput(
            f"trace {str(path)!r} is torn: it stops at line {check.records} without an end; its run broke off"
        )
    left_out(f"{path.name} stops at line {check.records} without an end: its run broke off, or still goes on")


def is_empty(path: Path) -> str:
    """What to say about an empty trace."""
    return f"trace {str(path)!r} is empty: its run was killed before it recorded anything"


def holds_nothing(run: Path) -> bool:
    """Whether the trace has no complete line: the run never started, or was killed before its header was written."""
    try:
        with (run / TRACE_FILE).open("rb") as file:
            first = file.readline(_HEADER_BYTES)
    except FileNotFoundError:
        return True
    except OSError:  # reading the trace will report the reason
        return False
    begins = b'{"event": "run"'
    return not first.endswith(b"\n") and first[: len(begins)] == begins[: len(first)]


def check_next(
    check: TraceCheck, path: Path, record: dict[str, Any], remedy: str = "give it as quorate wrote it"
) -> None:
    """Check the next record of a trace; BadInput, with the line, if quorate cannot have written it."""
    if check.records == 0:
        if record["event"] != "run" or "schema" not in record:
            raise foreign(path)
        wrong = why_not_readable(record["schema"])
        if wrong is not None:
            raise BadInput(f"trace {str(path)!r} {wrong}")
    try:
        check.take(record)
    except Unfit as unfit:
        line = check.records + 1
        raise BadInput(f"trace {str(path)!r} is damaged at line {line}; {remedy} (line {line} {unfit})") from None


def foreign(path: Path) -> BadInput:
    """The error for a file that is no trace."""
    return BadInput(
        f"{str(path)!r} is not a quorate trace: its first line is no header; "
        f"give the folder of a run, or its {TRACE_FILE}"
    )


def feed(records: Iterable[dict[str, Any]], recorder: Recorder) -> None:
    """Call a recorder with the events of a trace."""
    tell = Telling(recorder).tell
    for record in records:
        tell(record)


class Telling:
    """Calls a recorder with the events of a trace, record by record, in memory that does not grow with the run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[int, Ticket] = {}
        self._cancelled: OrderedDict[int, Ticket] = OrderedDict()  # tickets that an "abandon" record may still name

    def tell(self, record: dict[str, Any]) -> None:
        recorder, open_tickets, cancelled = self._recorder, self._open, self._cancelled
        event = record["event"]
        if event == "run":
            recorder.run({key: value for key, value in record.items() if key not in ("event", "schema")})
            return
        time = record["time"]
        if event == "start":
            worker, incarnation, version = record["worker"], record["incarnation"], record["version"]
            ticket = Ticket(record["ticket"], worker, incarnation, version, record["batch"], record["samples"])
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
            if len(cancelled) > CANCELLED_KEPT:
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
        else:
            assert event == "end"
            recorder.ended(time, record["version"], record["reason"], record["digest"])


def parts_of(record: dict[str, Any]) -> Parts | None:
    """The parts of the time that an "arrive" record holds."""
    if "compute_s" not in record:
        return None
    return Parts(record["data_s"], record["compute_s"], record["transfer_s"])


def norms_of(record: dict[str, Any]) -> Norms | None:
    """The norms that an "apply" record holds."""
    return Norms(*record["norms"]) if "norms" in record else None


_FLUSH_LINES, _FLUSH_S = 2048, 1.0


class TraceWriter(LineRecorder):
    """Writes a trace to a new file, or continues a trace after its first `keep_bytes`.

    A full disk does not end the run: lines that cannot be written are kept, and retried later. A thread flushes the
    lines about every second, so that a slow run can be watched. Lines are only appended to the end of the list and
    removed from its front, so adding a line needs no lock.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        self._path = path
        self._file = path.open("x+b" if keep_bytes is None else "r+b", buffering=0)
        self._written = keep_bytes or 0
        if keep_bytes is not None:
            self._file.truncate(keep_bytes)
            self._file.seek(keep_bytes)
        self._lines: list[str] = []
        self._flush_at = _FLUSH_LINES
        self._warned = False
        self._flushing = threading.Lock()
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_periodically, name="quorate-trace", daemon=True)
        self._flusher.start()

    def run(self, header: dict[str, Any]) -> None:
        """Write the header, and sync it at once: a run that is killed a moment later can be restarted from it."""
        super().run(header)
        self.flush()
        with suppress(OSError):
            self.sync()

    def _write(self, line: str) -> None:
        lines = self._lines
        lines.append(line)
        if len(lines) >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Write buffered lines to the file, so that other processes can read them; warn once if that fails."""
        try:
            self.position()
            self._flush_at = _FLUSH_LINES
        except OSError as error:
            self._flush_at = len(self._lines) + _FLUSH_LINES
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the trace {str(self._path)!r} cannot be written ({error.strerror}); "
                    f"training goes on, and the missing lines will be written as soon as the disk allows",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def position(self) -> int:
        """Write buffered lines, and return the length of the file; raises OSError if they cannot be written."""
        with self._flushing:
            count = len(self._lines)
            data = "".join(self._lines[:count]).encode()
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self._written)  # removes a half-written line
                self._file.seek(self._written)
                raise
            self._written += len(data)
            del self._lines[:count]
            if not self._path.exists() or not self._path.samefile(f"/dev/fd/{self._file.fileno()}"):
                raise FileNotFoundError(errno.ENOENT, "it was deleted or moved away")
            return self._written

    def move_to(self, path: Path) -> None:
        """Continue in a new file, with a copy of the old one, which may have been deleted."""
        with self._flushing:
            moved = path.open("x+b", buffering=0)
            try:
                self._file.seek(0)
                left = self._written
                while left:
                    left -= moved.write(self._file.read(min(left, 1 << 20)) or b"")
            except OSError:
                moved.close()
                path.unlink()
                self._file.seek(self._written)
                raise
            self._file.close()
            self._file, self._path = moved, path

    def _flush_periodically(self) -> None:
        while not self._closing.wait(_FLUSH_S):
            with suppress(OSError):  # the run retries the write, and warns
                self.position()

    def sync(self) -> None:
        """Wait until the written lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self._closing.set()
            self._flusher.join()
            self.flush()
            self._file.close()
