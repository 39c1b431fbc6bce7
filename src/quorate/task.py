"""What to train: a small class with a model, data, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from quorate.errors import BadInput, check_at_least, unknown_name
from quorate.user_code import code_to_run, load_class

READY_TASKS = {
    "digits": "quorate.tasks.digits:Digits",
    "mnist": "quorate.tasks.mnist:Mnist",
    "cifar10": "quorate.tasks.cifar10:Cifar10",
    "cifar10-inception": "quorate.tasks.cifar10:Cifar10Inception",
    "pixelcnn": "quorate.tasks.pixelcnn:PixelCnn",
    "charlm": "quorate.tasks.charlm:CharLm",
    "cartpole": "quorate.tasks.cartpole:CartPole",
}
NEEDED = ("model", "train_data", "loss", "optimizer")


class Task:
    """Base class for tasks; subclassing is optional, any object with these methods will do.

    Needed: `model()`, `train_data()`, `loss(model, batch)`, `optimizer(params)`.
    Optional: `schedule(optimizer)`, `evaluate(model)`, `collate(samples)`, `batch_size`.
    """

    #: Samples in a worker's batch.
    batch_size: ClassVar[int] = 32

    def model(self) -> nn.Module:
        """A new model; the random numbers it draws are seeded by the run."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """A map-style data set (`__getitem__` and `__len__`), or a stream: `__getitem__` alone, of a seed."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, as a scalar."""
        raise NotImplementedError

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Any optimizer of torch.optim."""
        raise NotImplementedError


class BoundTask:
    """A user's task, checked, with the optional parts filled in. Engines use only this class."""

    def __init__(
        self, task: Any, batch_size: int | None = None, name: str | None = None, source: str | None = None
    ) -> None:
        if isinstance(task, type):
            task = task()
        for method in NEEDED:
            given = getattr(task, method, None)
            inherited = getattr(type(task), method, None) is getattr(Task, method)
            if not callable(given) or inherited:
                raise BadInput(
                    f"task {type(task).__name__} has no method {method!r}; "
                    f"a task needs {', '.join(f'{needed}()' for needed in NEEDED)}"
                )
        self.task = task
        self.name = name or type(task).__name__
        #: The text by which another process can load the same task; None if the task was given as an object.
        self.source = source
        where = (source or "").rpartition(":")[0]
        #: The absolute path of `file.py:Class`, to find the task from another folder.
        self.file = str(Path(where).absolute()) if where.endswith(".py") else None
        size = batch_size if batch_size is not None else getattr(task, "batch_size", Task.batch_size)
        self.batch_size = check_at_least("batch_size", size, 1)
        self._data: Any = None
        self._tensors: list[Tensor] | None = None

    # ------------------------------------------------------------ model and optimizer

    def model(self, seed: int, device: torch.device) -> nn.Module:
        """The model, with parameters drawn from the run's seed; the caller's random state does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.task.model()
        if not isinstance(model, nn.Module):
            raise BadInput(f"task {self.name}: model() gave a {type(model).__name__}, not a torch.nn.Module")
        if any(isinstance(one, nn.UninitializedParameter) for one in model.parameters()):
            raise BadInput(f"task {self.name}: the model has lazy parameters without a shape; run it once in model()")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise BadInput(f"task {self.name}: the model has no parameter to train")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise BadInput(
                    f"task {self.name}: {name} is on the meta device, which holds no numbers; "
                    f"make the model on the CPU in model(), or fill it there after to_empty(device='cpu')"
                )
            if tensor.is_complex() and tensor.requires_grad:
                raise BadInput(
                    f"task {self.name}: {name} is a complex parameter, and gradients are summed as real numbers; "
                    f"train torch.view_as_real of it, and use torch.view_as_complex in forward()"
                )
        return model.to(device)

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self.task.optimizer(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadInput(f"task {self.name}: optimizer() gave a {type(optimizer).__name__}, not a torch.optim one")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise BadInput("LBFGS evaluates the loss inside its step, which no worker can do for it; use another")
        given = set(params)
        other = sum(one not in given for group in optimizer.param_groups for one in group["params"])
        if other:
            raise BadInput(
                f"task {self.name}: the optimizer has {other} parameter{'' if other == 1 else 's'} that optimizer() "
                f"was not given; make it of those it gets, e.g. torch.optim.SGD(params, lr=0.1)"
            )
        return optimizer

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any | None:
        """The learning-rate schedule, stepped once a version; None without one."""
        make = getattr(self.task, "schedule", None)
        schedule = None if make is None else make(optimizer)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise BadInput(
                "ReduceLROnPlateau waits for a measure, but a schedule follows the version here; use another"
            )
        return schedule

    # ------------------------------------------------------------ data

    @property
    def data(self) -> Any:
        """The training data, made once."""
        if self._data is None:
            data = self.task.train_data()
            if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
                raise BadInput(
                    f"task {self.name}: train_data() gave a {type(data).__name__}, which cannot be indexed; "
                    f"give a map-style data set, or a stream whose __getitem__ takes a seed"
                )
            self._data = data
        return self._data

    def samples(self) -> int | None:
        """The number of samples; None for a stream."""
        return len(self.data) if hasattr(self.data, "__len__") else None

    def on_device(self, device: torch.device) -> None:
        """Move a TensorDataset to the device once, instead of batch by batch."""
        if type(self.data) is TensorDataset and getattr(self.task, "collate", None) is None:
            self._tensors = [tensor.to(device) for tensor in self.data.tensors]

    @property
    def index_device(self) -> torch.device:
        """The device for sample indices: that of the data after `on_device`, else the CPU."""
        return torch.device("cpu") if self._tensors is None else self._tensors[0].device

    def batch(self, indices: Tensor, device: torch.device) -> Any:
        """The samples of these indices [n], collated, on the device."""
        if self._tensors is not None:
            return [tensor.index_select(0, indices) for tensor in self._tensors]
        collate: Callable[[Any], Any] | None = getattr(self.task, "collate", None)
        batch = (collate or default_collate)(_fetch(self.data, indices.tolist()))
        return batch if device.type == "cpu" else to_device(batch, device)

    # ------------------------------------------------------------ loss and evaluation

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.task.loss(model, batch)
        if type(loss) is Tensor and loss.dim() == 0 and loss.requires_grad:
            return loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise BadInput(f"task {self.name}: loss() gave {what}, but it must be a scalar tensor; take the mean")
        if not loss.requires_grad:
            raise BadInput(f"task {self.name}: loss() gave a value that depends on no parameter (detached?)")
        return loss.reshape(())

    def evaluate(self, model: nn.Module, seed: int) -> dict[str, float]:
        """The task's own measures, e.g. accuracy on held-out data; empty without `evaluate`.

        Random numbers that it draws are seeded, and the caller's random state does not change.
        """
        evaluate = getattr(self.task, "evaluate", None)
        if evaluate is None:
            return {}
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                measures = evaluate(model)
        finally:
            model.train(training)
        if not isinstance(measures, dict):
            raise BadInput(
                f"task {self.name}: evaluate() gave a {type(measures).__name__}; give a dict of names and numbers"
            )
        try:
            return {str(name): float(value) for name, value in measures.items()}
        except (TypeError, ValueError, RuntimeError):
            raise BadInput(f"task {self.name}: evaluate() gave {measures!r}; every value must be one number") from None


def _fetch(data: Any, indices: list[int]) -> list[Any]:
    if hasattr(data, "__getitems__"):
        fetched: list[Any] = data.__getitems__(indices)
        return fetched
    samples = []
    for index in indices:
        try:
            samples.append(data[index])
        except Exception as error:
            error.add_note(f"(it was raised by sample {index} of the training data)")
            raise
    return samples


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors moved to the device, also those in lists, tuples and dicts."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def load_task(text: str) -> Any:
    """A task by name: a ready one (`digits`), `file.py:Class` or `package.module:Class`."""
    place = READY_TASKS.get(text, text)
    if ":" not in place and not place.endswith(".py"):
        raise unknown_name("task", text, [*READY_TASKS, "file.py:Class", "package.module:Class"])
    found = load_class("task", place)
    if not isinstance(found, type):
        return found
    try:
        return found()
    except TypeError as error:
        raise BadInput(f"task {text!r} cannot be made without arguments: {error}; give them defaults") from error


def bind_task(task: Any, batch_size: int | None = None) -> BoundTask:
    """The `BoundTask` of a task given as an object, a class or a text; traces record its name."""
    if isinstance(task, str):
        return BoundTask(load_task(task), batch_size, task, source=task)
    kind = task if isinstance(task, type) else type(task)
    place = f"{kind.__module__}:{kind.__qualname__}"
    ready = {known: name for name, known in READY_TASKS.items()}
    return BoundTask(task, batch_size, ready.get(place, place))


def recorded_task(header: dict[str, Any]) -> str:
    """The text of the task that a trace's header names; BadInput if the user must name that code again."""
    task: str | None = header["task"]
    if task is None:
        raise BadInput("the run was made without gradients, so its trace names no task")
    return task if task in READY_TASKS else code_to_run("task", task, header.get("task_file"))
