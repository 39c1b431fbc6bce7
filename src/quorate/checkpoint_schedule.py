"""When checkpoints of a run are taken: by time or by number of updates, and at its end."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from quorate.checkpoint import CheckpointFolder
from quorate.coordinator import Coordinator
from quorate.engines.base import Engine
from quorate.errors import BadInput, LearnerLost
from quorate.out_folder import OutFolder
from quorate.tensor_state import find_safetensors

#: Seconds between checkpoints where the user sets no number of updates; fewer if a part of the learner may be lost.
EVERY_S, LOSABLE_EVERY_S = 60.0, 1.0
#: Checkpoints by time are at least this many times their own duration apart, so they take at most 1/20 of the time.
SHARE = 20.0


class Checkpoints:
    """Takes checkpoints of a run in the background: copies the state between two events; a thread writes it."""

    def __init__(self, folder: OutFolder, coordinator: Coordinator, engine: Engine, every: int | None) -> None:
        self._folder, self._every = folder, every
        self._coordinator, self._engine = coordinator, engine
        self._open()
        self._asked = False
        self._began: float | None = None  # when the last checkpoint was taken
        self._took_s = 0.0
        self._is_timed = True  # `_took_s` is that of the last checkpoint
        # The user may want checkpoints at certain updates only; a learner that may be lost needs them by time as well.
        by_time = every is None or engine.may_lose_learner
        self._every_s = (LOSABLE_EVERY_S if engine.may_lose_learner else EVERY_S) if by_time else math.inf
        self._wrong: str | None = None  # why the last checkpoint could not be written
        self._has_warned = False

    def _open(self) -> None:
        """Write into the folder where the run is now."""
        self._saved = _TracedFolder(self._folder)
        self._writer = self._engine.checkpoint_writer(self._saved, self._failed)

    def _failed(self, sentence: str) -> None:
        self._wrong = sentence
        if not self._has_warned:
            self._has_warned = True
            warn(f"{sentence} (checkpoints that fail from now on are not mentioned)")

    def after_update(self, version: int, time: float) -> None:
        """Take a checkpoint soon if it is time and the last one is written; the first comes after the first update."""
        self._asked = self._asked or (self._every is not None and version % self._every == 0)
        if (not self._asked and self._every_s == math.inf) or self._writer.busy:
            return
        if self._began is not None and not self._is_timed:
            self._is_timed, self._took_s = True, self._saved.took_s or time - self._began
        is_time = self._began is None or time - self._began >= max(self._every_s, SHARE * self._took_s)
        if self._asked or is_time:
            self._asked = False
            self._coordinator.call_at_rest(self.take)

    def move_learner(self, time: float) -> None:
        """Save the learner before its node leaves; LearnerLost then restarts the run from that checkpoint."""
        self.take_last(time)
        raise LearnerLost("a node that holds a part of the learner has announced its end")

    def take(self, time: float) -> None:
        """Copy the state of the run now; the copy is written while the run goes on."""
        self._began, self._is_timed = time, False
        try:
            position = self._position()
        except OSError as error:
            self._failed(f"no checkpoint of version {self._coordinator.version}: {error.strerror or error}")
            return
        state = {
            "protocol": self._coordinator.state(time),
            "engine": self._engine.state(),
            "rng": torch.get_rng_state(),
            "trace_bytes": position,
        }
        self._writer.submit(self._coordinator.version, state)

    def _position(self) -> int:
        """The length of the trace in bytes. A folder that was deleted is made again first."""
        assert self._folder.trace is not None
        try:
            return self._folder.trace.position()
        except FileNotFoundError as error:
            if not self._folder.move(str(error.strerror)):
                raise
            self._open()
            return self._folder.trace.position()

    def take_last(self, time: float) -> None:
        """Take the last checkpoint and wait until it is written; in another folder if this one fails."""
        has_warned = self._has_warned
        try:
            self._writer.finish()
            self._has_warned = True  # a failure of this one is reported at the end of the run
            while True:
                self._wrong = None
                self.take(time)
                self._writer.finish()
                if self._wrong is None or not self._folder.move(str(self._wrong).partition(": ")[2].partition(";")[0]):
                    return
                self._open()
        except BadInput as error:  # the state has come to hold a value that no checkpoint can hold
            self._has_warned = has_warned
            self._failed(f"no checkpoint of version {self._coordinator.version}: {error}")

    def save_after_error(self) -> str:
        """Save a run that cannot go on, if possible; returns a sentence that says which checkpoint there is."""
        if self._coordinator.can_be_saved:
            self.take_last(self._coordinator.last_time)
            if self._wrong is not None:
                return f"({self._wrong})"
        else:
            self._writer.finish()
        version = max(self._saved.versions(), default=None)
        if version is None:
            return "(there is no checkpoint to go on from)"
        return f"(a checkpoint of version {version} is in {str(self._folder.path)!r})"

    def finish(self) -> None:
        self._writer.finish()


def checkpoints_of(
    folder: OutFolder, coordinator: Coordinator, engine: Engine, every: int | None
) -> Checkpoints | None:
    """The run's `Checkpoints`; None, with a warning, if it cannot be saved and the user did not ask for checkpoints."""
    try:
        find_safetensors()
        engine.check_can_save()  # fail now rather than after an hour
    except BadInput as error:
        if every is not None:
            raise
        warn(f"this run keeps no checkpoints: {error}")
        return None
    return Checkpoints(folder, coordinator, engine, every)


class _TracedFolder(CheckpointFolder):
    """Syncs the trace to disk before a checkpoint that refers to it, and measures how long saving takes."""

    took_s = 0.0

    def __init__(self, folder: OutFolder) -> None:
        super().__init__(folder.path)
        self._trace = folder.trace

    def prepare(self) -> None:
        assert self._trace is not None
        self._trace.sync()

    def save(self, version: int, state: dict[str, Any], *, durable: bool = True) -> Path:
        began = monotonic()
        saved = super().save(version, state, durable=durable)
        self.took_s = monotonic() - began
        return saved


def warn(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
