"""Transfer of a task to worker processes: by its name, or pickled apart from its tensors.

Tensors are not pickled: the pickle refers to their memory, which travels as raw bytes. `TensorStorages` and
`TensorUnpickler` do this for all engines. The local engine writes everything once into memory without a name, which
only child processes can read, and every worker maps the tensors copy-on-write.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quorate.errors import BadInput
from quorate.flat import ALIGNMENT_BYTES
from quorate.task import BoundTask, load_task

_LENGTHS = 16  # bytes of the header: the lengths of the description and of the pickle


# ---------------------------------------------------------------- tensors apart from their pickle


class TensorStorages:
    """The storages of all tensors in a pickle. A storage is stored once, even if several tensors are views of it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []  # each storage as bytes
        self._numbers: dict[int, int] = {}  # address -> index in `tensors`

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Persistent id for the pickler: storage number, dtype, shape, stride and offset.

        None for anything but a plain CPU tensor; the pickler then handles the object as usual.
        """
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or obj.requires_grad:
            return None
        obj = obj.resolve_conj().resolve_neg()  # the memory of a lazy conjugate or negative holds other numbers
        dtype = str(obj.dtype).removeprefix("torch.")
        return self._number(obj.untyped_storage()), dtype, tuple(obj.shape), obj.stride(), obj.storage_offset()

    def _number(self, storage: torch.UntypedStorage) -> int:
        found = self._numbers.get(storage.data_ptr()) if storage.nbytes() else None
        if found is None:
            found = self._numbers[storage.data_ptr()] = len(self.tensors)
            self.tensors.append(torch.empty(0, dtype=torch.uint8).set_(storage))
        return found


class TensorUnpickler(pickle.Unpickler):
    """Rebuilds tensors over the given memory: one tensor of bytes for each storage, in the order of `TensorStorages`.

    A byte tensor may itself be a view into a larger mapping.
    """

    def __init__(self, pickled: bytes, storages: list[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._storages = storages

    def persistent_load(self, pid: Any) -> Tensor:
        number, name, shape, stride, offset = pid
        memory, dtype = self._storages[number], getattr(torch, name)
        first = memory.storage_offset() // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), first + offset, shape, stride)


# ---------------------------------------------------------------- the file of a local run


def write_job(descriptor: int, task: BoundTask, description: dict[str, Any]) -> None:
    """Write everything that a worker must know into an anonymous file: two lengths, description, pickle, tensors."""
    pickled, storages = b"", TensorStorages()
    description = {**description, "name": task.name, "text": task.source, "main": None, "argv": sys.argv}
    if task.source is None:
        pickled, needs_main = _pickled(task, storages)
        if needs_main:
            description["main"] = _main_to_import(task)
    places, nbytes = _storage_places(storages.tensors)
    text = json.dumps({**description, "storages": places}).encode()
    head = len(text).to_bytes(8, "little") + len(pickled).to_bytes(8, "little") + text + pickled
    start = _aligned(len(head))
    os.ftruncate(descriptor, start + nbytes)
    with mmap.mmap(descriptor, start + nbytes) as memory:
        memory[: len(head)] = head
        for (offset, size), tensor in zip(places, storages.tensors, strict=True):
            if size:
                there = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start + offset)
                there.copy_(tensor)
                del there  # the mapping cannot be closed while a tensor refers to it


def read_description(descriptor: int) -> dict[str, Any]:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as memory:
        stop = _LENGTHS + int.from_bytes(memory[:8], "little")
        found: dict[str, Any] = json.loads(memory[_LENGTHS:stop])
    return found


def read_task(descriptor: int, description: dict[str, Any]) -> BoundTask:
    """Load the task in a worker."""
    if description["text"] is not None:
        task = load_task(description["text"])
    else:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)  # a worker may change its data; only its own
        text, pickled = int.from_bytes(memory[:8], "little"), int.from_bytes(memory[8:_LENGTHS], "little")
        stop = _LENGTHS + text + pickled
        tensors = torch.frombuffer(memory, dtype=torch.uint8)[_aligned(stop) :]
        storages = [tensors[offset : offset + size] for offset, size in description["storages"]]
        task = TensorUnpickler(memory[stop - pickled : stop], storages).load()
    return BoundTask(task, description["batch_size"], description["name"])


def _pickled(task: BoundTask, storages: TensorStorages) -> tuple[bytes, bool]:
    """The pickle of a task, and whether something in it is defined in the user's script."""
    needs_main = False

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            nonlocal needs_main
            if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
                needs_main = True
            return storages.persistent_id(obj)

    file = io.BytesIO()
    try:
        Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(task.task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BadInput(
            f"task {task.name} cannot be sent to a worker process: {error}; define its class and functions at the top "
            f"level of a module, e.g. my_task.py, and give 'my_task.py:{type(task.task).__name__}'"
        ) from error
    return file.getvalue(), needs_main


def _storage_places(tensors: list[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Offset and size of each storage, and the bytes of all, with each storage aligned."""
    places, nbytes = [], 0
    for tensor in tensors:
        places.append((nbytes, tensor.nbytes))
        nbytes = _aligned(nbytes + tensor.nbytes)
    return places, nbytes


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---------------------------------------------------------------- the user's script


def _main_to_import(task: BoundTask) -> dict[str, str]:
    """Name or path by which a worker imports the user's script, which defines the task."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"module": name}
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise BadInput(
            f"task {task.name} is defined in an interactive session, which a worker process cannot import; "
            f"move it into a module, e.g. my_task.py, and give 'my_task.py:{type(task.task).__name__}'"
        )
    return {"path": str(Path(file).resolve())}


def import_main(main: dict[str, str] | None) -> None:
    """Import the user's script under another name, so that its `if __name__ == "__main__"` block does not run."""
    if main is None:
        return
    if "module" in main:
        found = runpy.run_module(main["module"], run_name="__mp_main__", alter_sys=True)
    else:
        found = runpy.run_path(main["path"], run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(found)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
