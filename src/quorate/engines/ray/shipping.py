"""How a task gets to the nodes: by its name, or as an object whose tensors lie in Ray's object store.

A task given as file.py:Class goes with the code of its file, so nodes need not have it. What it imports from other
files is looked for on the node, and missing there is a sentence with the remedy.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from quorate.engines.ray.private_memory import own
from quorate.errors import BadInput
from quorate.task import READY_TASKS, BoundTask, load_task

_FROM_FILES = "quorate_task_"  # how quorate.task names the modules it makes from files

try:
    VERSION = version("quorate")
except PackageNotFoundError:  # run from its source, without an installation
    VERSION = "of unknown version"


def ship(task: BoundTask) -> dict[str, Any]:
    """What rebuilds the task on any node; give it to `ray.put` once. Arrays in it are read there without a copy.

    It is a plain dict, so that a node with another quorate can read whose it is.
    """
    parcel: dict[str, Any] = {
        "quorate": VERSION,
        "name": task.name,
        "batch_size": task.batch_size,
        "source": task.source,
        "pickled": None,
        "storages": [],
    }
    by_name = task.source is not None and (task.source in READY_TASKS or not _is_file(task.source))
    if not by_name:
        parcel["pickled"], parcel["storages"] = _pickled(task)
    return parcel


def unship(parcel: dict[str, Any]) -> BoundTask:
    """The task, on a node; BadInput names what the node lacks."""
    if parcel["quorate"] != VERSION:
        raise BadInput(
            f"node {node_address()} has quorate {VERSION}, but the run is of quorate {parcel['quorate']}; install the "
            f"same on every node, or let Ray do it with runtime_env={{'pip': ['quorate[ray]=={parcel['quorate']}']}}"
        )
    name = parcel["name"]
    with explained(name):
        if parcel["pickled"] is None:
            made = load_task(parcel["source"])
        else:
            made = _Unpickler(parcel["pickled"], parcel["storages"]).load()
            if isinstance(made, type):
                made = made()
        return BoundTask(made, parcel["batch_size"], name, source=parcel["source"])


@contextmanager
def explained(name: str) -> Iterator[None]:
    """What a task misses on a node, in a sentence; also for its model() and train_data(), which may read files."""
    try:
        yield
    except Exception as error:
        missing = _missing(error)
        if missing is None:
            raise
        raise BadInput(
            f"task {name}: node {node_address()} does not have {missing}; send the folder that holds it with "
            f"working_dir=DIR (--working-dir DIR), or provide it on every node (runtime_env={{'pip': […]}}, a shared "
            f"disk)"
        ) from error


def _missing(error: BaseException | None) -> str | None:
    """The module or file that is not there, if that is what went wrong."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return f"the module {error.name!r}"
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            return f"the file {str(error.filename)!r}"
        error = error.__cause__
    return None


def node_address() -> str:
    """The address of the node this process is on."""
    import ray

    if not ray.is_initialized():
        return "?"
    address: str = ray.util.get_node_ip_address()
    return address


def _is_file(source: str) -> bool:
    return source.rpartition(":")[0].endswith(".py")


# ---------------------------------------------------------------- objects


def _pickled(task: BoundTask) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    storages = _Storages()
    with _code_of_files_included():
        try:
            _pickler(file, storages).dump(_to_send(task))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise BadInput(
                f"task {task.name} cannot be sent to other machines: {error}; make what cannot be pickled (locks, open "
                f"files, connections) in model() or train_data(), which run there"
            ) from error
    return file.getvalue(), storages.arrays()


def _to_send(task: BoundTask) -> Any:
    """Of a task that was named by its class, the class: it is then made on the node, as it was made here."""
    if task.source is not None and not _is_file(task.source):
        return task.task
    kind = type(task.task)
    class_name = "" if task.source is None else task.source.rpartition(":")[2]
    found = getattr(sys.modules.get(kind.__module__), class_name, None) if class_name else None
    return kind if found is kind else task.task


@contextmanager
def _code_of_files_included() -> Iterator[None]:
    """Inside, classes that were loaded from a file are pickled with their code."""
    from ray import cloudpickle

    modules = [module for name, module in sys.modules.items() if name.startswith(_FROM_FILES)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


class _Storages:
    """Memory of tensors, each piece once however many tensors look at it."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._tensors: list[Tensor] = []

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        found = self._known.get(storage.data_ptr()) if storage.nbytes() else None
        if found is None:
            found = len(self._tensors)
            self._tensors.append(torch.empty(0, dtype=torch.uint8).set_(storage))
            self._known[storage.data_ptr()] = found
        return found

    def arrays(self) -> list[Any]:
        """As arrays of bytes, which Ray puts into its store without pickling them."""
        return [tensor.numpy() for tensor in self._tensors]


def _pickler(file: io.BytesIO, storages: _Storages) -> Any:
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> Any:
            if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or obj.requires_grad:
                return None
            obj = obj.resolve_conj().resolve_neg()  # a view that is marked so has other numbers in memory
            dtype = str(obj.dtype).removeprefix("torch.")
            return storages.number(obj), dtype, tuple(obj.shape), obj.stride(), obj.storage_offset()

    return Pickler(file)


class _Unpickler(pickle.Unpickler):
    """Tensors are made over private memory: Ray's is shared by every worker of the node, and a task may change its."""

    def __init__(self, pickled: bytes, storages: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._arrays = storages
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        place, dtype, shape, stride, offset = pid
        if place not in self._made:
            self._made[place] = own(self._arrays[place])
        memory = self._made[place]
        first = memory.storage_offset() // getattr(torch, dtype).itemsize
        return torch.empty(0, dtype=getattr(torch, dtype)).set_(memory.untyped_storage(), first + offset, shape, stride)
