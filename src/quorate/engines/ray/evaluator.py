"""The evaluator, an actor on the driver's node: it evaluates, and writes checkpoints and the final parameters.

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
from quorate.engines.ray.task_transfer import explained, unpack_task
from quorate.engines.ray.transport import ActorConfig, Cut, Segment, as_tensor, read_blocks, unpack_state
from quorate.engines.shared.compute import Computer, TensorPlace
from quorate.errors import WorkerFailed
from quorate.learner import digest
from quorate.out_folder import save_parameters
from quorate.seeds import derive


class Evaluator:
    """An actor with one thread and its own model, which reads the newest version from the shards.

    `block` is the block of that version. `pieces` are objects: first the version's parts in shards on other nodes, in
    shard order, then, if `averaged`, the moving averages of all shards.
    """

    def __init__(self, payload: dict[str, Any], config: ActorConfig) -> None:
        torch.set_num_threads(config.threads)
        sys.argv[:] = config.argv
        self._payload, self._config = payload, config
        self._segments: list[Segment | None] = []

    def __repr__(self) -> str:
        return "evaluator"  # Ray's prefix of the lines that this actor prints

    def describe(self) -> list[int]:
        """Load the task; the bytes of each trained tensor."""
        self._task = unpack_task(self._payload)
        with explained(self._task.name):
            model = self._task.model(self._config.seed, torch.device("cpu"))
        return [one.numel() * one.element_size() for one in model.parameters() if one.requires_grad]

    def begin(self, cut: Cut) -> tuple[bool, ...]:
        """Build the model and attach to the shards; see `attach`."""
        self._computer = Computer(
            self._task,
            seed=self._config.seed,
            device=torch.device("cpu"),
            wire=self._config.wire,
            look_through=False,
            check=lambda: None,
            cut=cut.parts,
        )
        return self.attach(cut)

    def attach(self, cut: Cut) -> tuple[bool, ...]:
        """Open the shards' memory, again after a shard was replaced. For each shard: whether its memory is shared."""
        self._segments = cut.attach(self._segments, ray.get_runtime_context().get_node_id())
        return tuple(segment is not None for segment in self._segments)

    # ------------------------------------------------------------ the newest version

    def evaluate(self, version: int, block: int, averaged: bool, *pieces: Any) -> dict[str, float]:
        """The task's measures of a version."""
        self._load(block, averaged, pieces)
        try:
            return self._task.evaluate(self._computer.model, derive(self._config.seed, "evaluate", version))
        except Exception as error:
            raise _sendable(error) from None

    def digest(self, block: int, *pieces: Any) -> str:
        """Digest of a version."""
        self._load(block, False, pieces)
        return digest(self._computer.model.state_dict())

    def write(self, path: str, block: int, averaged: bool, *pieces: Any) -> list[str]:
        """Write a version to a file on this node, which is also the driver's; the names of the tensors in order."""
        self._load(block, averaged, pieces)
        parameters = self._computer.model.state_dict()
        save_parameters(Path(path), parameters)
        return list(parameters)

    def _load(self, block: int, averaged: bool, pieces: Sequence[Any]) -> None:
        """Point the model at a version."""
        computer = self._computer
        remote = self._segments.count(None)
        memories = read_blocks(self._segments, block, pieces[:remote])
        place = TensorPlace(list(zip(computer.layouts, memories, strict=True)), gradient=False, lasting=False)
        computer.look_at(place, object())
        if averaged:
            averages: list[Tensor] = []
            for layout, array in zip(computer.layouts, pieces[remote:], strict=True):
                averages += layout.params.views(as_tensor(array))
            for parameter, average in zip(computer.params, averages, strict=True):
                parameter.data = average

    # ------------------------------------------------------------ checkpoints

    def save(self, run: str, version: int, state: dict[str, Any], engine: dict[str, Any], *shards: Any) -> str | None:
        """Write a checkpoint; returns a sentence if the disk refused it."""
        whole = {**state, "engine": {**engine, "shards": [unpack_state(*packed) for packed in shards]}}
        return save_or_explain(CheckpointFolder(Path(run)), version, whole)


def _sendable(error: Exception) -> Exception:
    """A user's exception if it can be pickled, else WorkerFailed: Ray would take the actor for dead."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return WorkerFailed(f"the evaluation failed:\n{''.join(traceback.format_exception(error))}")
