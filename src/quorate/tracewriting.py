"""Writes a trace to its file, a thousand lines at a time and at least once a second."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from quorate.trace import LineRecorder

_FLUSH_LINES, _FLUSH_S = 2048, 1.0


class TraceWriter(LineRecorder):
    """Writes a trace to a new file, or goes on with one after its first `keep_bytes`.

    A disk that is full does not end the run: what cannot be written is kept, and tried again later. A thread hands
    over what was written about every second, so that a slow run can be watched; lines are only ever appended to the
    list, and whole ones taken from its front, so that writing one needs no lock.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        self._path = path
        self._file = path.open("xb" if keep_bytes is None else "r+b", buffering=0)
        self._written = keep_bytes or 0
        if keep_bytes is not None:
            self._file.truncate(keep_bytes)
            self._file.seek(keep_bytes)
        self._lines: list[str] = []
        self._flush_at = _FLUSH_LINES
        self._warned = False
        self._flushing = threading.Lock()
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_now_and_then, name="quorate-trace", daemon=True)
        self._flusher.start()

    def _write(self, line: str) -> None:
        lines = self._lines
        lines.append(line)
        if len(lines) >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Hand what is buffered to the operating system, so that others can read it."""
        try:
            self.position()
            self._flush_at = _FLUSH_LINES
        except OSError as error:
            self._flush_at = len(self._lines) + _FLUSH_LINES
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the trace {str(self._path)!r} cannot be written ({error.strerror}); "
                    f"training goes on, and what is missing will be written when there is room",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def position(self) -> int:
        """Flush, and give the length of the file; raises OSError if that cannot be done."""
        with self._flushing:
            count = len(self._lines)
            data = "".join(self._lines[:count]).encode()
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self._written)  # no half line
                self._file.seek(self._written)
                raise
            self._written += len(data)
            del self._lines[:count]
            return self._written

    def _flush_now_and_then(self) -> None:
        while not self._closing.wait(_FLUSH_S):
            with suppress(OSError):  # the run itself will try again, and say so
                self.position()

    def sync(self) -> None:
        """Wait until the disk has what was flushed."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self._closing.set()
            self._flusher.join()
            self.flush()
            self._file.close()
