"""Where a run leaves its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from quorate.checkpoint import CHECKPOINTS
from quorate.errors import BadInput
from quorate.trace import TRACE_FILE, Recorder, feed
from quorate.tracewriting import TraceWriter

SUMMARY_FILE = "summary.json"
PARAMETERS_FILE = "parameters.safetensors"


class OutFolder:
    """A new folder for a run. Nothing is written before the run is known to be sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise BadInput(f"out is {str(path)!r}, which is a file; name a new folder")
        for name in (TRACE_FILE, SUMMARY_FILE, PARAMETERS_FILE, CHECKPOINTS):
            if (path / name).exists():
                raise BadInput(f"the folder {str(path)!r} already holds a run ({name}); name another, or move it away")
        self._made = not path.exists()

    def make(self, watchers: Sequence[Recorder]) -> TraceWriter:
        """The trace, open for writing."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return TraceWriter(self.path / TRACE_FILE)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> BadInput:
        return BadInput(f"the folder {str(self.path)!r} cannot be written: {error.strerror}")

    def discard(self) -> None:
        """Bad input came to light only when the run had begun: leave no trace of it."""
        if (self.path / CHECKPOINTS).exists():
            return  # there is something to go on from
        with suppress(NotADirectoryError):  # one of its parents is a file
            (self.path / TRACE_FILE).unlink(missing_ok=True)
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def finish(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2)
        (self.path / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")


def save_parameters(path: Path, parameters: dict[str, Tensor]) -> None:
    """Write parameters into a file."""
    if not parameters:
        return
    try:
        from safetensors.torch import save_file
    except ImportError:
        return  # a bare machine: the trace and the summary have all but the parameters
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in parameters.items()}, path)


def load_parameters(path: Path) -> dict[str, Tensor]:
    """Read them; the file is mapped, so they take memory only where they are looked at."""
    from safetensors.torch import load_file

    parameters: dict[str, Tensor] = load_file(path)
    return parameters


class OldFolder(OutFolder):
    """The folder of a run that goes on: its trace is kept up to where the checkpoint was taken."""

    def __init__(self, path: Path, trace_bytes: int) -> None:
        self.path = path
        self._made = False
        self._trace_bytes = trace_bytes
        trace = path / TRACE_FILE
        if not trace.is_file() or trace.stat().st_size < trace_bytes:
            raise BadInput(
                f"the trace in {str(path)!r} is shorter than its checkpoint says ({trace_bytes} bytes); "
                f"it was changed after the run"
            )

    def has_ended(self) -> bool:
        """Whether the run came to an end after the checkpoint, as it does unless it is killed."""
        with (self.path / TRACE_FILE).open("rb") as file:
            file.seek(self._trace_bytes)
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
        try:
            return bool(json.loads(last)["event"] == "end")
        except ValueError:  # torn, or nothing
            return False

    def make(self, watchers: Sequence[Recorder]) -> TraceWriter:
        """The trace, cut and open for more; the watchers are told what is in it."""
        trace = self.path / TRACE_FILE
        with trace.open("rb") as file:
            past = file.read(self._trace_bytes).decode("utf-8")
        records = [json.loads(line) for line in past.splitlines()]
        for watcher in watchers:
            feed(records, watcher)
        try:
            return TraceWriter(trace, keep_bytes=self._trace_bytes)
        except OSError as error:
            raise self._cannot_write(error) from error
