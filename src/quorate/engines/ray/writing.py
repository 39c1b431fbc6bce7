"""Checkpoints of a run whose tensors the driver never has: the keeper writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from quorate.checkpoint import CheckpointFolder
from quorate.engines.ray.calling import first_line, original

_GONE_ALLOWED = 3


class KeptByKeeper:
    """Lets the keeper write one checkpoint at a time, while training goes on."""

    def __init__(self, keeper: Callable[[], Any], folder: CheckpointFolder, on_failure: Callable[[str], None]) -> None:
        self._keeper, self._folder, self._on_failure = keeper, folder, on_failure
        self._writing: Any = None
        self._gone_in_a_row = 0

    @property
    def busy(self) -> bool:
        return self._writing is not None and not ray.wait([self._writing], timeout=0)[0]

    def submit(self, version: int, state: dict[str, Any]) -> None:
        """Begin to write a checkpoint of what `Ray.state` gave."""
        assert not self.busy, "one checkpoint at a time"
        self.finish()
        try:
            self._folder.prepare()
        except OSError as fault:
            self._on_failure(f"no checkpoint of version {version}: the trace cannot be written ({fault.strerror})")
            return
        engine = dict(state["engine"])
        shards = engine.pop("shards")
        rest = {name: value for name, value in state.items() if name != "engine"}
        run = str(self._folder.folder.parent.resolve())
        self._writing = self._keeper().save.remote(run, version, rest, engine, *shards)

    def finish(self) -> None:
        """Wait for the checkpoint being written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            sentence = ray.get(writing)
        except RayError as error:
            cause = original(error)
            if not isinstance(cause, RayError):
                raise cause from error
            # The keeper is gone, which is mended, or a shard whose state it was to write, which the next update meets.
            self._gone_in_a_row += 1
            if self._gone_in_a_row < _GONE_ALLOWED:
                return
            sentence = f"the last {self._gone_in_a_row} checkpoints could not be written: {first_line(error)}"
        else:
            self._gone_in_a_row = 0
        if sentence is not None:
            self._on_failure(sentence)
