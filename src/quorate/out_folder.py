"""The folder of a run: its trace, summary, parameters and checkpoints; a new folder, or that of an earlier run."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from quorate.checkpoint import CHECKPOINTS, CheckpointFolder
from quorate.errors import BadInput
from quorate.schema import parse_lines
from quorate.tensor_state import save_file
from quorate.trace import TRACE_FILE, Recorder, Telling, TraceWriter, holds_nothing, read_until

SUMMARY_FILE = "summary.json"
PARAMETERS_FILE = "parameters.safetensors"
OLD_TRACE_FILE = f"{TRACE_FILE}.old"


class OutFolder:
    """A new folder for a run. No file is written before all arguments of the run are checked.

    If the folder cannot be written any more, or was deleted, the run moves to another one and `problem` says so.
    """

    problem: str | None = None
    moves = 0
    trace: TraceWriter | None = None  # while the run goes on
    _made = False  # the run made the folder, so `discard` may remove it
    _elsewhere: Sequence[Callable[[], str | Path]] = (Path.cwd, tempfile.gettempdir, Path.home)
    _files: ClassVar[tuple[str, ...]] = (TRACE_FILE, SUMMARY_FILE, PARAMETERS_FILE, CHECKPOINTS)  # of a run

    def __init__(self, path: Path) -> None:
        self.path = self._asked_for = path
        if path.exists() and not path.is_dir():
            raise BadInput(f"out is {str(path)!r}, which is a file; name a new folder")
        for name in self._files:
            if (path / name).exists() and not (name == TRACE_FILE and holds_nothing(path)):
                raise BadInput(f"the folder {str(path)!r} already holds a run ({name}); name another, or move it away")
        self._made = not path.exists()

    def make(self, watchers: Sequence[Recorder]) -> TraceWriter:
        """Make the folder, and return its trace, open for writing."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if holds_nothing(self.path):
                (self.path / TRACE_FILE).unlink(missing_ok=True)
            self.trace = TraceWriter(self.path / TRACE_FILE)
        except OSError as error:
            raise self._cannot_write(error) from error
        return self.trace

    def _cannot_write(self, error: OSError) -> BadInput:
        return BadInput(f"the folder {str(self.path)!r} cannot be written: {error.strerror}")

    def discard(self) -> None:
        """Remove the files of a run that broke off before its first update."""
        if any(CheckpointFolder(self.path).versions()):  # a checkpoint of version 0 does not count
            return  # the run can be resumed
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        with suppress(NotADirectoryError):  # one of its parents is a file
            (self.path / TRACE_FILE).unlink(missing_ok=True)
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    # ------------------------------------------------------------ disk failures

    def keep(self, write: Callable[[], None]) -> None:
        """Call `write`; if it raises OSError, move to another folder and retry. If all fail, `problem` says so."""
        try:
            write()
        except OSError as error:
            if self.move(error.strerror or str(error)):
                self.keep(write)

    def move(self, why: str) -> bool:
        """Move the run to the next folder that can be written; False if there is none.

        The first choice is the old folder, if it was deleted. Then come new folders in the current folder, in the
        folder for temporary files, and in the user's home.
        """
        assert self.trace is not None
        old, asked_for = self.path, str(self._asked_for)
        again = old == self._asked_for and not (old / TRACE_FILE).exists()
        while again or self._elsewhere:
            path = old if again else None
            try:
                if path is None:
                    parent, *self._elsewhere = self._elsewhere
                    path = Path(tempfile.mkdtemp(prefix=f"quorate-{self._asked_for.name}-", dir=parent()))
                path.mkdir(parents=True, exist_ok=True)
                self.trace.move_to(path / TRACE_FILE)
            except (OSError, RuntimeError):  # the second: no home is known
                if path is not None and not again:
                    shutil.rmtree(path, ignore_errors=True)
                again = False
                continue
            self.path, self.moves = path, self.moves + 1
            if again:
                self.problem = f"the folder {asked_for!r} was deleted during the run; it was made again"
                return True
            go_on = ""
            if CHECKPOINTS in self._files:
                go_on = f", or go on with it there (quorate train --resume {shlex.quote(str(path))})"
                with suppress(OSError, shutil.Error):
                    shutil.copytree(old / CHECKPOINTS, path / CHECKPOINTS, ignore=shutil.ignore_patterns(".*"))
            if old != self._asked_for:
                shutil.rmtree(old, ignore_errors=True)
            self.problem = (
                f"the folder {asked_for!r} cannot be written ({why}); the whole run is in {str(path)!r}: move it back "
                f"when that is mended{go_on}"
            )
            return True
        self.problem = (
            f"the folder {asked_for!r} cannot be written ({why}), nor can all of the run be written anywhere else; "
            f"what could be saved is in {str(self.path)!r}"
        )
        return False

    def finish(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2)
        (self.path / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")


def save_parameters(path: Path, parameters: dict[str, Tensor]) -> None:
    """Write parameters into a file; on a machine without safetensors they are left out."""
    if not parameters or find_spec("safetensors") is None:
        return
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in parameters.items()}, path)


def load_parameters(path: Path) -> dict[str, Tensor]:
    """Read parameters from a file. The file is mapped, so a parameter takes memory only once it is read."""
    from safetensors.torch import load_file

    parameters: dict[str, Tensor] = load_file(path)
    return parameters


def take_old_trace_back(path: Path) -> None:
    """Undo the first step of a restart that failed or was killed before it wrote a header: restore the old trace."""
    if holds_nothing(path):
        with suppress(OSError):
            (path / OLD_TRACE_FILE).replace(path / TRACE_FILE)


class ScriptFolder(OutFolder):
    """The folder for the trace and summary of a script's run. The script's own checkpoints may be in it, too."""

    _files = (TRACE_FILE, SUMMARY_FILE)


class RestartedFolder(OutFolder):
    """The folder of a run that was killed before its first checkpoint, and starts again. Its old trace is kept."""

    def __init__(self, path: Path) -> None:
        self.path = self._asked_for = path

    def make(self, watchers: Sequence[Recorder]) -> TraceWriter:
        try:
            (self.path / TRACE_FILE).replace(self.path / OLD_TRACE_FILE)
        except OSError as error:
            raise self._cannot_write(error) from error
        return super().make(watchers)


class ResumedFolder(OutFolder):
    """The folder of a resumed run: its trace is kept up to where the checkpoint was taken."""

    def __init__(self, path: Path, trace_bytes: int) -> None:
        self.path = self._asked_for = path
        self._trace_bytes = trace_bytes
        trace = path / TRACE_FILE
        if not trace.is_file() or trace.stat().st_size < trace_bytes:
            raise BadInput(
                f"the trace in {str(path)!r} is shorter than its checkpoint says ({trace_bytes} bytes); "
                f"it was changed after the run"
            )

    def has_ended(self) -> bool:
        """Whether the trace has an "end" record after the checkpoint; a killed run has none."""
        with (self.path / TRACE_FILE).open("rb") as file:
            file.seek(self._trace_bytes)
            last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
        try:
            return bool(parse_lines(last)[0]["event"] == "end")
        except ValueError:  # torn or empty
            return False

    def make(self, watchers: Sequence[Recorder]) -> TraceWriter:
        """The trace, cut at the checkpoint and open for more; the watchers are told its records first."""
        trace = self.path / TRACE_FILE
        telling = [Telling(watcher) for watcher in watchers]
        for record in read_until(trace, self._trace_bytes):
            for one in telling:
                one.tell(record)
        try:
            self.trace = TraceWriter(trace, keep_bytes=self._trace_bytes)
        except OSError as error:
            raise self._cannot_write(error) from error
        return self.trace
