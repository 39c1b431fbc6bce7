"""The keeper sits on the driver's node: it evaluates, and writes checkpoints and the final parameters.

The driver could do all this, but then its memory would grow with the model.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from quorate.checkpoint import CheckpointFolder, save_or_explain
from quorate.engines.processes.computing import Computer, Place
from quorate.engines.ray.segment import Segment, attach
from quorate.engines.ray.setting import Cut, Setting, as_tensor, unpack_state
from quorate.engines.ray.shipping import explained, unship
from quorate.errors import WorkerFailed
from quorate.learner import digest
from quorate.outfolder import save_parameters
from quorate.seeds import derive


def _that_can_be_sent(error: Exception) -> Exception:
    """A user's exception may hold anything, and Ray takes one that it cannot pickle for the end of the actor."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return WorkerFailed(f"the evaluation failed:\n{''.join(traceback.format_exception(error))}")


class Keeper:
    """An actor with one thread and a model of its own, which looks at the newest version where that lies."""

    def __init__(self, parcel: dict[str, Any], setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        sys.argv[:] = setting.argv
        self._parcel, self._setting = parcel, setting
        self._segments: list[Segment | None] = []

    def __repr__(self) -> str:
        return "keeper"

    def describe(self) -> list[int]:
        """Load the task; the bytes of each tensor that is trained."""
        self._task = unship(self._parcel)
        with explained(self._task.name):
            model = self._task.model(self._setting.seed, torch.device("cpu"))
        return [one.numel() * one.element_size() for one in model.parameters() if one.requires_grad]

    def begin(self, cut: Cut) -> tuple[bool, ...]:
        """Get ready; gives which shards' memory it shares."""
        self._computer = Computer(
            self._task,
            seed=self._setting.seed,
            device=torch.device("cpu"),
            wire=self._setting.wire,
            look_through=False,
            check=lambda: None,
            cut=cut.parts,
        )
        return self.attach(cut)

    def attach(self, cut: Cut) -> tuple[bool, ...]:
        """Find the memory of the shards, which are others when one was lost."""
        node = ray.get_runtime_context().get_node_id()
        for old in self._segments:
            if old is not None:
                old.close()
        self._segments = [attach(segment, node) for segment in cut.segments]
        return tuple(segment is not None for segment in self._segments)

    # ------------------------------------------------------------ the newest version

    def evaluate(self, version: int, block: int, averaged: bool, *pieces: Any) -> dict[str, float]:
        """The task's measures of a version; `pieces` as a worker gets them, and then all averages, if there are any."""
        self._look_at(block, averaged, pieces)
        try:
            return self._task.evaluate(self._computer.model, derive(self._setting.seed, "evaluate", version))
        except Exception as error:
            raise _that_can_be_sent(error) from None

    def digest(self, block: int, *pieces: Any) -> str:
        """The fingerprint of a version."""
        self._look_at(block, False, pieces)
        return digest(self._computer.model.state_dict())

    def write(self, path: str, block: int, averaged: bool, *pieces: Any) -> list[str]:
        """Write a version into a file on this machine, for the driver, who is here too; gives the names in order."""
        self._look_at(block, averaged, pieces)
        parameters = self._computer.model.state_dict()
        save_parameters(Path(path), parameters)
        return list(parameters)

    def _look_at(self, block: int, averaged: bool, pieces: Sequence[Any]) -> None:
        computer = self._computer
        elsewhere = sum(segment is None for segment in self._segments)
        objects = iter(pieces[:elsewhere])
        found = [
            segment.block(block) if segment is not None else as_tensor(next(objects)) for segment in self._segments
        ]
        place = Place(list(zip(computer.layouts, found, strict=True)), gradient=False, lasting=False)
        computer.look_at(place, object())
        if averaged:
            averages: list[Tensor] = []
            for layout, array in zip(computer.layouts, pieces[elsewhere:], strict=True):
                averages += layout.params.views(as_tensor(array))
            for parameter, average in zip(computer.params, averages, strict=True):
                parameter.data = average

    # ------------------------------------------------------------ checkpoints

    def save(self, run: str, version: int, state: dict[str, Any], engine: dict[str, Any], *shards: Any) -> str | None:
        """Write a checkpoint; a sentence if the disk refused it."""
        whole = {**state, "engine": {**engine, "shards": [unpack_state(*packed) for packed in shards]}}
        return save_or_explain(CheckpointFolder(Path(run)), version, whole)
