"""The watcher: a thread that follows a growing trace and publishes snapshots of it."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quorate.errors import BadInput
from quorate.reporting.comparison import finite
from quorate.reporting.findings import GOOD_ENDS, to_go_on, with_advice
from quorate.reporting.live.state import LiveMetrics, snapshot
from quorate.reporting.report.data import plan_of, run_folder
from quorate.schema import TraceCheck, parse_lines
from quorate.trace import TRACE_FILE, Telling, check_next, foreign

CHUNK_BYTES = 1 << 18  # some 2,500 records: a few milliseconds, so that other threads can run in between
_LONGEST_LINE_BYTES = 1 << 26  # an update of a million tickets still fits
_TAIL_BYTES = 4096  # several records, since two records may well end with the same bytes
_REMEDY = "what is shown is the run up to there"


class News(NamedTuple):
    """Records added to a trace since the last read."""

    records: list[dict[str, Any]]
    anew: bool  # the records start at the beginning of the file; forget earlier ones
    damage: BadInput | None = None  # the error right after these records; the next read raises it


def trace_file(run: Path) -> Path:
    """The trace file of a run that may not have started. `run` is a folder, unless it is a file or named like one."""
    try:
        is_file = run.is_file() or (run.suffix == ".jsonl" and not run.is_dir())
    except OSError:  # not accessible; reading it will report why
        is_file = False
    return run if is_file else run / TRACE_FILE


class Follower:
    """Reads one trace incrementally. A half-written last line is kept back until it is complete.

    A resumed run truncates its trace to a checkpoint and continues. The follower detects that by a shorter file, or by
    different bytes just before its offset if the file has grown again in between.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exists = False
        self.size_bytes = 0
        self.offset_bytes = 0  # read so far, including a half-written line
        self.modified_at: float | None = None  # on the clock of the file system
        self._check = TraceCheck()
        self._damage: BadInput | None = None
        self._descriptor: int | None = None
        self._identity = (0, 0)
        self._rest = b""
        self._tail = b""

    def read(self) -> News:
        """The next chunk of records. Raises BadInput if the file is no trace, or damaged at the current offset."""
        anew = self._look()
        if self._damage is not None:
            raise self._damage
        if self._descriptor is None:
            return News([], anew)
        try:
            data = os.pread(self._descriptor, CHUNK_BYTES, self.offset_bytes)
        except OSError as error:
            raise self._cannot_be_read(error) from error
        if not data:
            return News([], anew)
        self.offset_bytes += len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            raise foreign(self.path)
        records = self._checked(whole) if newline else []
        return News(records, anew, self._damage)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _look(self) -> bool:
        """Open a new file, or reopen a changed one; returns whether reading starts from the beginning."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            self.exists = False  # the records of a deleted file are still shown
            return False
        except OSError as error:  # part of the path is a file, or a folder without permission
            raise self._cannot_be_read(error) from error
        if not stat.S_ISREG(found.st_mode):  # a pipe would block, and can be read only once
            raise BadInput(f"the trace {str(self.path)!r} is no plain file; give the folder of a run")
        self.exists = True
        self.size_bytes, self.modified_at = found.st_size, found.st_mtime
        if self._descriptor is not None:
            if (found.st_dev, found.st_ino) == self._identity and self._tail == self._bytes_before():
                return False
            self.close()
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise self._cannot_be_read(error) from error
        self._identity = (found.st_dev, found.st_ino)
        self.offset_bytes = 0
        self._check, self._damage = TraceCheck(), None
        self._rest = self._tail = b""
        return True

    def _bytes_before(self) -> bytes:
        assert self._descriptor is not None
        return os.pread(self._descriptor, len(self._tail), self.offset_bytes - len(self._tail))

    def _checked(self, whole: bytes) -> list[dict[str, Any]]:
        """The records of complete lines, up to the first damaged one."""
        checked: list[dict[str, Any]] = []
        try:
            for record in self._parsed(whole):
                check_next(self._check, self.path, record, _REMEDY)
                checked.append(record)
        except BadInput as damage:
            if self._check.records == 0:
                raise
            self._damage = damage
        return checked

    def _parsed(self, whole: bytes) -> Iterator[dict[str, Any]]:
        try:
            yield from parse_lines(whole)
            return
        except ValueError:
            lines = whole.split(b"\n")
        for line in lines:
            try:
                yield from parse_lines(line)
            except ValueError:
                number = self._check.records + 1
                if number == 1:
                    raise foreign(self.path) from None
                raise BadInput(
                    f"trace {str(self.path)!r} is torn: line {number} is not a whole record; {_REMEDY}"
                ) from None

    def _cannot_be_read(self, error: OSError) -> BadInput:
        return BadInput(f"the trace {str(self.path)!r} cannot be read: {error.strerror}; give the folder of a run")


ABSENT, READING, RUNNING, ENDED, UNREADABLE = "absent", "reading", "running", "ended", "unreadable"

QUIET_S = 5  # without new records for this long, a run may have broken off
_MOST_PLANNED = 64  # workers; with more, the planner would delay closing
_READ_S, _PUBLISH_S = 0.2, 0.5  # intervals
_PACE_S = 30.0  # the window from which the time left is estimated
_BEHIND_BYTES = 1 << 23  # a larger backlog is shown as status READING


class Published(NamedTuple):
    """A snapshot, as an object and as JSON bytes."""

    number: int  # grows with each snapshot that differs
    state_number: int  # grows only when `state` differs
    content: dict[str, Any]
    body: bytes
    body_without_state: bytes  # small; for a page that already has this state


class Watcher:
    """Follows the trace of a run and publishes a snapshot about twice a second."""

    def __init__(self, run: Path) -> None:
        self._follower = Follower(trace_file(run))
        self._metrics = LiveMetrics()
        self._telling = Telling(self._metrics)
        self._record_count = 0
        self._newest_s = 0.0  # time of the newest record, on the clock of the run
        self._caught_up = False
        self._problem: str | None = None
        self._plan: dict[str, Any] | None = None  # made once, when the run has ended; empty if no plan is possible
        self._grown_at = time.monotonic()
        self._past: deque[tuple[float, int, float]] = deque()  # (wall clock, updates, share) since it caught up
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="quorate-watch", daemon=True)
        self.published = Published(0, 0, {"state": None}, b"", b"")

    @property
    def path(self) -> Path:
        return self._follower.path

    def __enter__(self) -> Watcher:
        self._read()
        self._publish()  # so that the first snapshot is available at once
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._follower.close()

    def wait(self, after: int, timeout_s: float) -> Published:
        """The newest snapshot; waits up to `timeout_s` for one with a number above `after`."""
        with self._changed:
            self._changed.wait_for(lambda: self.published.number > after, timeout_s)
            return self.published

    # ------------------------------------------------------------ the thread

    def _follow(self) -> None:
        next_at = time.monotonic()
        while not self._closing.is_set():
            grew = self._read()
            now = time.monotonic()
            if now >= next_at:
                next_at = now + _PUBLISH_S
                self._publish()
                if self._plan is None and self._status() == ENDED:
                    self._plan = self._ask_planner()
            if not grew:
                self._closing.wait(_READ_S)

    def _read(self) -> bool:
        """Read the next chunk; returns whether there was one."""
        before = self._follower.offset_bytes
        try:
            news = self._follower.read()
            if news.anew:
                self._begin_anew()
            if self._problem is not None:
                return False
            for record in news.records:
                self._telling.tell(record)
                self._record_count += 1
            if news.records:
                self._newest_s = news.records[-1].get("time", self._newest_s)
            if news.damage is not None:
                raise news.damage
        except BadInput as error:
            self._problem = str(error)
            return False
        grew = self._follower.offset_bytes != before
        if grew:
            self._grown_at = time.monotonic()
        if self._follower.exists and self._follower.offset_bytes >= self._follower.size_bytes:
            self._caught_up = True
        return grew

    def _begin_anew(self) -> None:
        self._metrics = LiveMetrics()
        self._telling = Telling(self._metrics)
        self._record_count, self._newest_s = 0, 0.0
        self._caught_up, self._problem, self._plan = False, None, None
        self._past.clear()

    def _ask_planner(self) -> dict[str, Any]:
        """Plan the finished run. Only once, since it takes a second or more."""
        try:
            workers = self._metrics.header["workers"]
            return (plan_of([run_folder(self.path)], workers)[0] or {}) if workers <= _MOST_PLANNED else {}
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):  # a damaged trace
            return {}

    def _publish(self) -> None:
        before = self.published
        content = self._content()
        state_number = before.state_number + (content["state"] != before.content["state"])
        content["state_number"] = state_number
        rest = _as_json({key: value for key, value in content.items() if key != "state"})
        if rest == before.body_without_state:
            return
        with self._changed:
            self.published = Published(before.number + 1, state_number, content, _as_json(content), rest)
            self._changed.notify_all()

    # ------------------------------------------------------------ content of a snapshot

    def _content(self) -> dict[str, Any]:
        follower = self._follower
        shown = snapshot(self._metrics, run_folder(self.path)) if self._metrics.header else None
        if shown is not None and self._plan:
            shown["findings"] = with_advice(shown["findings"], self._plan, self._metrics.header)
        return {
            "trace": str(self.path),
            "status": self._status(),
            "problem": self._problem,
            "read_share": follower.offset_bytes / follower.size_bytes if follower.size_bytes else 0.0,
            "records": self._record_count,
            "newest_s": finite(self._newest_s),
            "quiet_s": (quiet_s := self._quiet_s()),
            "ended_well": self._metrics.ending in GOOD_ENDS,
            "to_go_on": self._to_go_on(quiet_s),
            "wall": self._wall(),
            "state": finite(shown),
        }

    def _status(self) -> str:
        if self._problem is not None:
            return UNREADABLE
        if self._metrics.ending is not None:
            return ENDED
        if not self._metrics.header and (not self._follower.exists or self._caught_up):
            return ABSENT
        behind = self._follower.size_bytes - self._follower.offset_bytes
        return RUNNING if self._caught_up and behind < _BEHIND_BYTES else READING

    def _quiet_s(self) -> int | None:
        """Whole seconds without new records, while the run has not ended; at the start, the age of the file."""
        if self._status() != RUNNING:
            return None
        quiet_s = time.monotonic() - self._grown_at
        modified_at = self._follower.modified_at
        if modified_at is not None:
            quiet_s = max(quiet_s, time.time() - modified_at)
        return int(quiet_s)

    def _to_go_on(self, quiet_s: int | None) -> str | None:
        """The command that resumes a run that was stopped or seems to have broken off; None if there is none."""
        stopped = self._metrics.ending is not None and self._metrics.ending not in GOOD_ENDS
        return to_go_on(self.path, self._metrics.header) if stopped or (quiet_s or 0) >= QUIET_S else None

    def _wall(self) -> dict[str, float | None]:
        """Updates per second and time left on the wall clock, which differs from the clock of a simulated run."""
        nothing: dict[str, float | None] = {"updates_per_s": None, "left_s": None}
        if self._status() != RUNNING:
            return nothing
        now, share = time.monotonic(), self._metrics.share()
        self._past.append((now, self._metrics.updates, share or 0.0))
        while now - self._past[0][0] > _PACE_S:
            self._past.popleft()
        since, updates, share_then = self._past[0]
        if now - since < 1.0:
            return nothing
        done = (share or 0.0) - share_then
        left_s = (1 - (share or 0.0)) * (now - since) / done if done > 0 else None
        return {"updates_per_s": (self._metrics.updates - updates) / (now - since), "left_s": left_s}


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
