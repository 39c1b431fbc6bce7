"""When checkpoints of a run are taken: every so many updates, at its end, and where the learner may be lost."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from quorate._tensor_state import find_safetensors
from quorate.checkpoint import CheckpointFolder
from quorate.coordinator import Coordinator
from quorate.engines.base import Engine
from quorate.errors import BadInput, LearnerLost
from quorate.tracewriting import TraceWriter

#: An engine that may lose a part of the learner has a checkpoint taken so often, but not more than that share of time
#: is spent on it (1/20).
LOSABLE_EVERY_S, LOSABLE_SHARE = 1.0, 20.0


class Checkpoints:
    """Writes checkpoints of a run beside it: the state is copied between two events, and written by a thread."""

    def __init__(
        self, out: Path, trace: TraceWriter, coordinator: Coordinator, engine: Engine, every: int | None
    ) -> None:
        self._out, self._trace, self._every = out, trace, every
        self._coordinator, self._engine = coordinator, engine
        self._writer = engine.checkpoint_writer(_TracedFolder(out, trace), self._failed)
        self._asked = False
        self._began = self._took_s = 0.0  # the last one: when, and how long it took
        self._is_timed = True
        self._wrong: str | None = None  # why the last one could not be written

    def _failed(self, sentence: str) -> None:
        self._wrong = sentence
        warn(sentence)

    def after_update(self, version: int, time: float) -> None:
        """Take one soon, if it is time and the last one is written."""
        self._asked = self._asked or (self._every is not None and version % self._every == 0)
        if (not self._asked and not self._engine.may_lose_learner) or self._writer.busy:
            return
        if not self._is_timed:
            self._is_timed, self._took_s = True, time - self._began
        is_time = time - self._began >= max(LOSABLE_EVERY_S, LOSABLE_SHARE * self._took_s)
        if self._asked or (is_time and self._engine.may_lose_learner):
            self._asked = False
            self._coordinator.call_at_rest(self.take)

    def move_learner(self, time: float) -> None:
        """A part of the learner must go elsewhere: save it as it is, and go on from there."""
        self.take_last(time)
        raise LearnerLost("a node that holds a part of the learner has announced its end")

    def take(self, time: float) -> None:
        """Copy everything as it is now; the copy is written while the run goes on."""
        self._began, self._is_timed = time, False
        try:
            position = self._trace.position()
        except OSError as error:
            warn(
                f"no checkpoint of version {self._coordinator.version}: the trace cannot be written ({error.strerror})"
            )
            return
        state = {
            "protocol": self._coordinator.state(time),
            "engine": self._engine.state(),
            "rng": torch.get_rng_state(),
            "trace_bytes": position,
        }
        self._writer.submit(self._coordinator.version, state)

    def take_last(self, time: float) -> None:
        """One more at the end, complete before the run goes on to end."""
        self._wrong = None
        try:
            self._writer.finish()
            self.take(time)
            self._writer.finish()
        except BadInput as error:  # something that cannot be saved came into the state on the way
            self._failed(f"no checkpoint of version {self._coordinator.version}: {error}")

    def last_words(self, time: float) -> str:
        """Save what there is of a run that cannot go on, and say where."""
        self.take_last(time)
        if self._wrong is not None:
            return f"({self._wrong})"
        return f"(a checkpoint of version {self._coordinator.version} is in {str(self._out)!r})"

    def finish(self) -> None:
        self._writer.finish()


def checkpoints_of(
    out: Path, trace: TraceWriter, coordinator: Coordinator, engine: Engine, every: int | None
) -> Checkpoints | None:
    """What writes checkpoints; None, with a warning, where that cannot be done and nobody asked for them."""
    try:
        find_safetensors()
        engine.check_can_save()  # rather now than after an hour
    except BadInput as error:
        if every is not None:
            raise
        warn(f"this run keeps no checkpoints: {error}")
        return None
    return Checkpoints(out, trace, coordinator, engine, every)


class _TracedFolder(CheckpointFolder):
    """Brings the trace to disk before a checkpoint that refers to it."""

    def __init__(self, run: Path, trace: TraceWriter) -> None:
        super().__init__(run)
        self._trace = trace

    def prepare(self) -> None:
        self._trace.sync()


def warn(sentence: str) -> None:
    """Tell whoever runs this."""
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
