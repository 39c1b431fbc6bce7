"""How a task gets into a worker process: by its name, or as an object whose tensors lie in shared memory.

An object is pickled, as multiprocessing would do it, but into memory without a name that only our own child processes
can read. Its tensors are not: they are written once, and every worker maps them, copying only what it changes.
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

_LENGTHS = 16  # bytes of the two lengths in front: of the description, of the pickle


def write_job(descriptor: int, task: BoundTask, description: dict[str, Any]) -> None:
    """Everything a worker must know, into an anonymous file."""
    pickled, storages = b"", _Storages()
    description = {**description, "name": task.name, "text": task.source, "main": None, "argv": sys.argv}
    if task.source is None:
        pickled, needs_main = _pickled(task, storages)
        if needs_main:
            description["main"] = _main_to_import(task)
    description["storages"] = storages.places
    text = json.dumps(description).encode()
    start = _aligned(_LENGTHS + len(text) + len(pickled))
    os.ftruncate(descriptor, max(start + storages.nbytes, 1))
    head = len(text).to_bytes(8, "little") + len(pickled).to_bytes(8, "little") + text + pickled
    _write_all(descriptor, head)
    storages.write(descriptor, start)


def read_description(descriptor: int) -> dict[str, Any]:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    found: dict[str, Any] = json.loads(os.pread(descriptor, length, _LENGTHS))
    return found


def read_task(descriptor: int, description: dict[str, Any]) -> BoundTask:
    """The task, in a worker."""
    if description["text"] is not None:
        task = load_task(description["text"])
    else:
        lengths = os.pread(descriptor, _LENGTHS, 0)
        text, pickled = int.from_bytes(lengths[:8], "little"), int.from_bytes(lengths[8:], "little")
        start = _aligned(_LENGTHS + text + pickled)
        data = _read_all(descriptor, pickled, _LENGTHS + text)
        task = _Unpickler(io.BytesIO(data), _mapped_storages(descriptor, start, description["storages"])).load()
    return BoundTask(task, description["batch_size"], description["name"])


def _write_all(descriptor: int, data: bytes) -> None:
    """One call writes at most 2 GB."""
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at : at + (1 << 30)], at)


def _read_all(descriptor: int, length: int, offset: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < length:
        pieces += os.pread(descriptor, min(length - len(pieces), 1 << 30), offset + len(pieces))
    return bytes(pieces)


# ---------------------------------------------------------------- objects


def _pickled(task: BoundTask, storages: _Storages) -> tuple[bytes, bool]:
    file = io.BytesIO()
    pickler = _Pickler(file, storages)
    try:
        pickler.dump(task.task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BadInput(
            f"task {task.name} cannot be sent to a worker process: {error}; define its class and functions at the top "
            f"level of a module, e.g. my_task.py, and give 'my_task.py:{type(task.task).__name__}'"
        ) from error
    return file.getvalue(), pickler.needs_main


class _Storages:
    """Memory of tensors, each piece once however many tensors look at it."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []  # offset, bytes
        self.nbytes = 0
        self._tensors: list[Tensor] = []
        self._known: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        found = self._known.get(storage.data_ptr()) if storage.nbytes() else None
        if found is None:
            found = len(self.places)
            self.places.append((self.nbytes, storage.nbytes()))
            self._tensors.append(torch.empty(0, dtype=torch.uint8).set_(storage))
            self._known[storage.data_ptr()] = found
            self.nbytes = _aligned(self.nbytes + storage.nbytes())
        return found

    def write(self, descriptor: int, start: int) -> None:
        if not self.nbytes:
            return
        with mmap.mmap(descriptor, start + self.nbytes) as memory:
            for (offset, size), tensor in zip(self.places, self._tensors, strict=True):
                if size:
                    there = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start + offset)
                    there.copy_(tensor)
                    del there  # the mapping cannot be closed while a tensor looks at it


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storages: _Storages) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._storages = storages
        self.needs_main = False  # whether something in it is defined in the user's script

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            self.needs_main = True
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or obj.requires_grad:
            return None
        obj = obj.resolve_conj().resolve_neg()  # a view that is marked so has other numbers in memory
        place = self._storages.number(obj)
        dtype = str(obj.dtype).removeprefix("torch.")
        return place, dtype, tuple(obj.shape), obj.stride(), obj.storage_offset()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[Tensor]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: Any) -> Tensor:
        place, dtype, shape, stride, offset = pid
        storage = self._storages[place].untyped_storage()
        return torch.empty(0, dtype=getattr(torch, dtype)).set_(
            storage, self._first(place, dtype) + offset, shape, stride
        )

    def _first(self, place: int, dtype: str) -> int:
        """Where a storage begins, in elements: all of them share one mapping."""
        tensor = self._storages[place]
        at: int = tensor.storage_offset() // getattr(torch, dtype).itemsize
        return at


def _mapped_storages(descriptor: int, start: int, places: list[list[int]]) -> list[Tensor]:
    size = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)  # a worker may change its data; only its own
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    return [everything[start + offset : start + offset + length] for offset, length in places]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---------------------------------------------------------------- the user's script


def _main_to_import(task: BoundTask) -> dict[str, str]:
    """How a worker can import the script that defines the task."""
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
    """Import the user's script under another name, so that what stands under `if __name__ == "__main__"` is not run."""
    if main is None:
        return
    if "module" in main:
        found = runpy.run_module(main["module"], run_name="__mp_main__", alter_sys=True)
    else:
        found = runpy.run_path(main["path"], run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(found)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
