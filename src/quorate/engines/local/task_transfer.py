"""Transfer of a task to worker processes: by its name, or as an object whose tensors lie in shared memory.

An object is pickled, as by multiprocessing, but into memory without a name that only child processes can read. Its
tensors are not pickled: they are written once, and every worker maps them copy-on-write.
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

from quorate.engines.shared.task_transfer import TensorStorages, TensorUnpickler
from quorate.errors import BadInput
from quorate.flat import ALIGNMENT_BYTES
from quorate.task import BoundTask, load_task

_LENGTHS = 16  # bytes of the header: the lengths of the description and of the pickle


def write_job(descriptor: int, task: BoundTask, description: dict[str, Any]) -> None:
    """Write everything that a worker must know into an anonymous file."""
    pickled, storages = b"", TensorStorages()
    description = {**description, "name": task.name, "text": task.source, "main": None, "argv": sys.argv}
    if task.source is None:
        pickled, needs_main = _pickled(task, storages)
        if needs_main:
            description["main"] = _main_to_import(task)
    places, nbytes = _storage_places(storages.tensors)
    description["storages"] = places
    text = json.dumps(description).encode()
    start = _aligned(_LENGTHS + len(text) + len(pickled))
    os.ftruncate(descriptor, max(start + nbytes, 1))
    head = len(text).to_bytes(8, "little") + len(pickled).to_bytes(8, "little") + text + pickled
    _write_all(descriptor, head)
    if nbytes:
        _write_storages(descriptor, start, nbytes, places, storages.tensors)


def read_description(descriptor: int) -> dict[str, Any]:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    found: dict[str, Any] = json.loads(os.pread(descriptor, length, _LENGTHS))
    return found


def read_task(descriptor: int, description: dict[str, Any]) -> BoundTask:
    """Load the task in a worker."""
    if description["text"] is not None:
        task = load_task(description["text"])
    else:
        lengths = os.pread(descriptor, _LENGTHS, 0)
        text, pickled = int.from_bytes(lengths[:8], "little"), int.from_bytes(lengths[8:], "little")
        start = _aligned(_LENGTHS + text + pickled)
        data = _read_all(descriptor, pickled, _LENGTHS + text)
        task = TensorUnpickler(data, _mapped_storages(descriptor, start, description["storages"])).load()
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


def _pickled(task: BoundTask, storages: TensorStorages) -> tuple[bytes, bool]:
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


def _storage_places(tensors: list[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Offset and size of each storage, and the bytes of all, with each storage aligned."""
    places, nbytes = [], 0
    for tensor in tensors:
        places.append((nbytes, tensor.nbytes))
        nbytes = _aligned(nbytes + tensor.nbytes)
    return places, nbytes


def _write_storages(
    descriptor: int, start: int, nbytes: int, places: list[tuple[int, int]], tensors: list[Tensor]
) -> None:
    with mmap.mmap(descriptor, start + nbytes) as memory:
        for (offset, size), tensor in zip(places, tensors, strict=True):
            if size:
                there = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start + offset)
                there.copy_(tensor)
                del there  # the mapping cannot be closed while a tensor refers to it


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storages: TensorStorages) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._storages = storages
        self.needs_main = False  # whether something in it is defined in the user's script

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            self.needs_main = True
        return self._storages.persistent_id(obj)


def _mapped_storages(descriptor: int, start: int, places: list[list[int]]) -> list[Tensor]:
    size = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)  # a worker may change its data; only its own
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    return [everything[start + offset : start + offset + length] for offset, length in places]


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
