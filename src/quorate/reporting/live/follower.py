"""Reads a trace that is still being written: whole lines as they come, and all of it anew when it was cut."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from quorate.errors import BadInput
from quorate.schema import why_not_readable
from quorate.trace import TRACE_FILE

CHUNK_BYTES = 1 << 18  # some 2,500 records: a few milliseconds, so that others get their turn
_LONGEST_LINE_BYTES = 1 << 26  # an update of a million tickets still fits
_TAIL_BYTES = 4096  # several records: the end of one may well be the same twice


class News(NamedTuple):
    """What was added to a trace since the last look."""

    records: list[dict[str, Any]]
    anew: bool  # these are the first of the file; forget what came before


def trace_file(run: Path) -> Path:
    """The trace of a run that may not have begun: a folder is meant, unless it is a file or named like one."""
    try:
        is_file = run.is_file() or (run.suffix == ".jsonl" and not run.is_dir())
    except OSError:  # nothing that can be looked at; reading will say why
        is_file = False
    return run if is_file else run / TRACE_FILE


class Follower:
    """Follows one trace. A half-written last line waits until it is whole.

    A resumed run cuts its trace to a checkpoint and goes on. That shows in a shorter file, or, where it has grown
    again in between, in other bytes just before the place that was reached.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exists = False
        self.size_bytes = 0
        self.offset_bytes = 0  # read so far, the half line included
        self.modified_at: float | None = None  # on the clock of the file system
        self.lines = 0
        self._descriptor: int | None = None
        self._identity = (0, 0)
        self._rest = b""
        self._tail = b""

    def read(self) -> News:
        """What is new, a chunk at most; raises BadInput where it is no trace."""
        anew = self._look()
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
            raise self._is_no_trace()
        records = self._parse(whole) if newline else []
        return News(records, anew)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _look(self) -> bool:
        """Open the file where it is new, or start again where it was changed; gives whether reading begins anew."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            self.exists = False  # what was read of a file that is gone is still shown
            return False
        except OSError as error:  # part of the path is a file, or a folder that is closed to us
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
        self.offset_bytes = self.lines = 0
        self._rest = self._tail = b""
        return True

    def _bytes_before(self) -> bytes:
        assert self._descriptor is not None
        return os.pread(self._descriptor, len(self._tail), self.offset_bytes - len(self._tail))

    def _parse(self, whole: bytes) -> list[dict[str, Any]]:
        count = whole.count(b"\n") + 1
        try:  # in one go: three times as fast as one by one
            records = json.loads(b"[" + whole.replace(b"\n", b",") + b"]")
        except (ValueError, RecursionError):
            records = []
        if len(records) != count or not all(type(record) is dict for record in records):
            self._name_bad_line(whole)
        if self.lines == 0:
            self._check_header(records[0])
        self.lines += count
        return records  # type: ignore[no-any-return]

    def _name_bad_line(self, whole: bytes) -> None:
        for number, line in enumerate(whole.split(b"\n"), start=self.lines + 1):
            try:
                good = type(json.loads(line)) is dict
            except (ValueError, RecursionError):
                good = False
            if not good:
                if number == 1:
                    raise self._is_no_trace()
                raise BadInput(
                    f"trace {str(self.path)!r} is torn: line {number} is not a whole record; "
                    f"what is shown is the run up to there"
                )
        raise self._is_no_trace()

    def _check_header(self, record: dict[str, Any]) -> None:
        if record.get("event") != "run" or "schema" not in record:
            raise self._is_no_trace()
        wrong = why_not_readable(record["schema"])
        if wrong is not None:
            raise BadInput(f"trace {str(self.path)!r} {wrong}")

    def _cannot_be_read(self, error: OSError) -> BadInput:
        return BadInput(f"the trace {str(self.path)!r} cannot be read: {error.strerror}; give the folder of a run")

    def _is_no_trace(self) -> BadInput:
        return BadInput(
            f"{str(self.path)!r} is not a quorate trace: its first line is no header; "
            f"give the folder of a run, or its {TRACE_FILE}"
        )
