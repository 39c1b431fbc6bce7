"""Snapshot of model and task state before a trial, to detect changes and restore it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quorate.engines.simulated.model import WorkerModel

#: Compared by value: a difference means the loss function changed Python state.
_PLAIN = (bool, int, float, str)

Container = dict[Any, Any] | list[Any]


class TrialSnapshot:
    """Copy of the parameters, of the state of `random`, and of the Python attributes of task and modules."""

    def __init__(self, worker: WorkerModel) -> None:
        self._worker = worker
        self._parameters = worker.learner.flat.buffer.clone()
        self._random_state = random.getstate()
        self._contents = [(container, container.copy()) for container in _all_containers(worker)]

    def parameters_changed(self) -> bool:
        """Whether a forward pass has written into the parameters."""
        return not torch.equal(self._parameters, self._worker.learner.flat.buffer)

    def restore(self) -> None:
        self._worker.learner.flat.buffer.copy_(self._parameters)
        random.setstate(self._random_state)
        for container, content in self._contents:
            container.clear()
            container.update(content) if isinstance(container, dict) else container.extend(content)
        self._worker.learner.clear_gradients()
        self._worker.buffers.reset()


def repeats_itself(worker: WorkerModel, batches: Sequence[int]) -> bool:
    """Whether a second call of the loss leaves Python state unchanged: no counter advances, no random number is drawn.

    A CUDA graph or a vmapped call runs the Python code of the loss only once. Call this after the first call of the
    loss, which may set up state.
    """
    worker.batches.seed(batches[0])
    seeded = torch.get_rng_state()
    before = random.getstate(), _plain_values(worker)
    worker.trial_gradient(*batches)
    on_gpu = worker.learner.flat.buffer.is_cuda  # on a CPU, dropout rightly draws from this generator
    drawn = on_gpu and not torch.equal(seeded, torch.get_rng_state())
    return not drawn and before == (random.getstate(), _plain_values(worker))


def _plain_values(worker: WorkerModel) -> list[Any]:
    """Sizes of the containers of task and modules, and the numbers and texts in them."""
    found: list[Any] = []
    for container in _all_containers(worker):
        found.append(len(container))
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        found += [(key, value) for key, value in pairs if isinstance(value, _PLAIN)]
    return found


def objects_to_keep_alive(worker: WorkerModel) -> list[Any]:
    """Objects of task and modules that a CUDA graph may read by address, such as a buffer or a growing table.

    Task and modules may replace them, so the graph must hold a reference.
    """
    return [worker.buffers.live(), *(container.copy() for container in _all_containers(worker))]


def task_tensors(worker: WorkerModel) -> list[Tensor]:
    """The tensors that the task has stored in its attributes."""
    found: list[Any] = []
    for container in _containers(worker.task.task):
        found += container.values() if isinstance(container, dict) else container
    return [one for one in found if isinstance(one, Tensor)]


def _all_containers(worker: WorkerModel) -> list[Container]:
    return _containers(worker.task.task, *worker.learner.model.modules())


def _containers(*owners: Any) -> list[Container]:
    """The attribute dicts of the owners, and the lists and dicts among the attributes."""
    attributes = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
    values = [value for container in attributes for value in container.values()]
    return [*attributes, *(value for value in values if type(value) is list or type(value) is dict)]
