"""`quorate.measure`: two lines in a training script that write a table of step times for `quorate plan`."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from quorate.errors import BadInput
from quorate.measuring.clocks import clock_for
from quorate.measuring.gathering import Meeting, Place, as_lines
from quorate.measuring.hooks import StepHooks

_blocks_of: Counter[str] = Counter()  # how many blocks this process has had under a name, so that meetings differ


def measure(path: str | Path, model: nn.Module, *, overwrite: bool = False, wait_s: float = 300.0) -> Measuring:
    """Write every process's own seconds per step, without its waiting for the others, to a CSV file.

        with quorate.measure("times.csv", model):
            for batch in loader:
                ...

    path: the file to write, with columns step, worker, seconds; a worker is a torch.distributed rank.
    model: what is trained, as the loop calls it: wrapped in DistributedDataParallel if it is.
    overwrite: replace a file that is there.
    wait_s: how long, at the end, to wait for the other processes' rows before each writes a file of its own.
    """
    return Measuring(Path(path), model, overwrite, wait_s)


class Measuring:
    """A block of a training script whose steps are timed."""

    def __init__(self, path: Path, model: nn.Module, overwrite: bool, wait_s: float) -> None:
        _check_model(model)
        if not 0 <= wait_s < 1e6:
            raise BadInput(f"wait_s is {wait_s!r}, but it must be seconds, 0 or more")
        self._path, self._wait_s = path, wait_s
        self._place = Place.here()
        self._check_path(overwrite)
        self._clock = clock_for(next(one.device for one in model.parameters() if one.requires_grad))
        self._hooks = StepHooks(model, self._clock)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is not part of training, such as an evaluation between two epochs."""
        self._hooks.pause()
        try:
            yield
        finally:
            self._hooks.resume()

    def __enter__(self) -> Self:
        self._hooks.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing here may raise: the training is done, and its own last lines still have to run."""
        self._hooks.detach()
        try:
            seconds = self._clock.finish()
        except RuntimeError:  # the device failed, which is what `error` is about
            seconds = array("d")
        name = f"quorate.measure/{self._path}/{_blocks_of[str(self._path)]}"
        _blocks_of[str(self._path)] += 1
        if not any(one == one for one in seconds):
            _warn("no step was measured: no optimizer that holds the model's parameters made a step in the block")
        if self._place.workers == 1:
            self._write(self._path, [seconds], [self._place.worker])
            return
        meeting = Meeting(name, self._place, self._wait_s)
        if kind is not None:
            meeting.miss()
            self._write_part(seconds, "the block ended with an error")
            return
        try:
            if self._place.worker == 0:
                rows = meeting.bring(seconds)
                assert rows is not None
                whole = self._write(self._path, rows, range(self._place.workers))
                meeting.announce(whole)
            else:
                meeting.bring(seconds)
                whole = meeting.heard_that_it_is_whole()
            if whole:
                with suppress(OSError):
                    self._part.unlink(missing_ok=True)  # of an earlier try
            else:
                self._write_part(seconds, "process 0 could not write the whole table")
        except (RuntimeError, ValueError) as problem:  # what a store raises when it is gone or waits in vain
            if self._place.worker == 0:
                meeting.announce(whole=False)
            first_line = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            self._write_part(seconds, f"not all processes came to the end of the block ({first_line[:100]})")

    # ------------------------------------------------------------ files

    @property
    def _part(self) -> Path:
        return self._path.with_name(f"{self._path.stem}.worker{self._place.worker}{self._path.suffix}")

    def _check_path(self, overwrite: bool) -> None:
        """Now rather than after hours of training."""
        for path in (self._path, self._part):
            if path.is_dir():
                raise BadInput(f"{str(path)!r} is a folder; name a file for the step times, such as times.csv")
            if path.exists() and not overwrite:
                raise BadInput(f"the file {str(path)!r} is already there; name another, or give overwrite=True")
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"the folder {str(folder)!r} cannot be made: {error.strerror}; name another") from error
        if not os.access(folder, os.W_OK):
            raise BadInput(f"the folder {str(folder)!r} cannot be written; name another for the step times")

    def _write_part(self, seconds: array[float], why: str) -> None:
        if self._write(self._part, [seconds], [self._place.worker]):
            _warn(f"{why}; the step times of worker {self._place.worker} are in {str(self._part)!r}")

    def _write(self, path: Path, rows: Sequence[array[float]], workers: Sequence[int]) -> bool:
        """The whole file or nothing of it."""
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8", newline=""
            ) as file:
                temporary = Path(file.name)
                file.writelines(as_lines(rows, workers))
            mask = os.umask(0)  # a temporary file is private; this one is for whoever may read the folder
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(path)
            return True
        except OSError as error:
            _warn(f"the step times cannot be written to {str(path)!r}: {error.strerror}")
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            return False


def _warn(sentence: str) -> None:
    warnings.warn(f"quorate.measure: {sentence}", stacklevel=4)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise BadInput(f"model is {type(model).__name__}, but it must be the nn.Module that is trained")
    if not any(one.requires_grad for one in model.parameters()):
        raise BadInput("no parameter of the model requires a gradient, so there are no training steps to measure")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model cannot be sharded without it
    sharded = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    if any(isinstance(one, sharded) for one in model.modules()):
        raise BadInput(
            "the model is sharded (FSDP): its workers wait for each other inside forward and backward, so a process "
            "has no step time of its own; measure the same model under DistributedDataParallel or in one process"
        )
