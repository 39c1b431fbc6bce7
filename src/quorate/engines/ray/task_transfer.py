"""Transfer of a task to the nodes: by its name, or pickled, with its tensors in Ray's object store.

Ray returns large arrays as read-only views of memory that all workers of a node share. A task may change its tensors,
for example normalise them, and other workers must not see the change; a copy in each worker would multiply the memory.
So the memory is mapped a second time, as private, and the system copies a page only when it is written. The file
behind that memory is unlinked, but the raylet, the parent of every worker, has it open. Where the mapping is not
possible, the array is copied.

A task given as file.py:Class travels with the code of its file, so nodes do not need the file. Modules that it imports
from other files must exist on the node; if one is missing, the error names it and the remedy.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quorate.engines.shared.task_transfer import TensorStorages, TensorUnpickler
from quorate.errors import BadInput, install_line
from quorate.task import READY_TASKS, BoundTask, load_task

#: Smaller arrays are copied, because a mapping costs more than it saves.
WORTH_MAPPING_BYTES = 1_000_000
_WIDEST_BYTES = 16  # of one element, a complex number; Ray aligns arrays to 64 bytes
#: Mapped arrays: Ray does not reuse their memory while they live. The list stays small, since a worker has one task.
_pinned: list[Any] = []
_FROM_FILES = "quorate_task_"  # prefix of the modules that quorate.user_code makes from files


def installed() -> dict[str, Any]:
    """The quorate version and whether torch exists on this node.

    It runs as a Ray task on nodes where quorate may be missing, so it must not import or refer to quorate.
    """
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    found: dict[str, Any] = {"quorate": None, "torch": find_spec("torch") is not None}
    if find_spec("quorate") is not None:
        try:
            found["quorate"] = version("quorate")
        except PackageNotFoundError:  # run from source, without an installation
            found["quorate"] = "of unknown version"
    return found


VERSION: str = installed()["quorate"]


def pack_task(task: BoundTask) -> dict[str, Any]:
    """The payload that rebuilds the task on any node; pass it to `ray.put` once. Nodes read its arrays without a copy.

    It is a plain dict, so that a node with another quorate version can still read the version in it.
    """
    payload: dict[str, Any] = {
        "quorate": VERSION,
        "name": task.name,
        "batch_size": task.batch_size,
        "source": task.source,
        "pickled": None,
        "storages": [],
    }
    by_name = task.source is not None and (task.source in READY_TASKS or not _is_file(task.source))
    if not by_name:
        payload["pickled"], payload["storages"] = _pickled(task)
    return payload


def unpack_task(payload: dict[str, Any]) -> BoundTask:
    """Rebuild the task on a node; BadInput names the module or file that the node lacks."""
    if payload["quorate"] != VERSION:
        raise BadInput(
            f"node {_node_address()} has quorate {VERSION}, but the run is of quorate {payload['quorate']}; install "
            f"the same on every node with {install_line('ray')}"
        )
    name = payload["name"]
    with explained(name):
        if payload["pickled"] is None:
            made = load_task(payload["source"])
        else:
            storages = [_private_tensor(array) for array in payload["storages"]]
            made = TensorUnpickler(payload["pickled"], storages).load()
            if isinstance(made, type):
                made = made()
        return BoundTask(made, payload["batch_size"], name, source=payload["source"])


# ---------------------------------------------------------------- errors


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn a missing module or file into BadInput. Also wraps model() and train_data(), which may read files."""
    try:
        yield
    except Exception as error:
        missing = _missing(error)
        if missing is None:
            raise
        raise BadInput(
            f"task {name}: node {_node_address()} does not have {missing}; send the folder that holds it with "
            f"working_dir=DIR (--working-dir DIR), or provide it on every node (runtime_env={{'pip': […]}}, a shared "
            f"disk)"
        ) from error


def _missing(error: BaseException | None) -> str | None:
    """The missing module or file, if one caused the error."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return f"the module {error.name!r}"
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            return f"the file {str(error.filename)!r}"
        error = error.__cause__
    return None


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "?"


# ---------------------------------------------------------------- pickling


def _is_file(source: str) -> bool:
    return source.rpartition(":")[0].endswith(".py")


def _pickled(task: BoundTask) -> tuple[bytes, list[Any]]:
    """The pickle of a task, and its storages as byte arrays, which Ray stores without pickling them."""
    from ray import cloudpickle

    storages = TensorStorages()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> Any:
            return storages.persistent_id(obj)

    file = io.BytesIO()
    with _code_of_files_included():
        try:
            Pickler(file).dump(_to_send(task))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise BadInput(
                f"task {task.name} cannot be sent to other machines: {error}; make what cannot be pickled (locks, open "
                f"files, connections) in model() or train_data(), which run there"
            ) from error
    return file.getvalue(), [tensor.numpy() for tensor in storages.tensors]


def _to_send(task: BoundTask) -> Any:
    """The class of a task that was given as file.py:Class, so that the node makes the object; else the object."""
    if task.source is not None and not _is_file(task.source):
        return task.task
    kind = type(task.task)
    class_name = "" if task.source is None else task.source.rpartition(":")[2]
    found = getattr(sys.modules.get(kind.__module__), class_name, None) if class_name else None
    return kind if found is kind else task.task


@contextmanager
def _code_of_files_included() -> Iterator[None]:
    """Inside, cloudpickle includes the code of classes that were loaded from a file."""
    from ray import cloudpickle

    modules = [module for name, module in sys.modules.items() if name.startswith(_FROM_FILES)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


# ---------------------------------------------------------------- private memory


def _private_tensor(array: Any) -> Tensor:
    """The bytes of an array [n] as a tensor whose changes no other process sees."""
    if array.nbytes >= WORTH_MAPPING_BYTES:
        with suppress(OSError, ValueError):
            mapped = _mapped(array)
            if mapped is not None:
                _pinned.append(array)
                return mapped
    return torch.from_numpy(array.copy())


def _mapped(array: Any) -> Tensor | None:
    """A private mapping of an array in Ray's store; None where the memory cannot be mapped."""
    address = array.__array_interface__["data"][0]
    found = _place_in_file(address, array.nbytes)
    if found is None or address % _WIDEST_BYTES:
        return None
    offset, file = found
    descriptor = _open_at_parent(file)
    if descriptor is None:
        return None
    try:
        before = offset % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(descriptor, before + array.nbytes, access=mmap.ACCESS_COPY, offset=offset - before)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=before)


def _place_in_file(address: int, nbytes: int) -> tuple[int, tuple[int, int]] | None:
    """Offset in the file whose shared mapping holds these bytes, and the file's device and inode, from /proc."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, offset, device, inode, *_ = line.split()
        start, end = (int(one, 16) for one in addresses.split("-"))
        if start <= address < end:
            is_shared = rights.endswith("s") and address + nbytes <= end
            major, minor = (int(one, 16) for one in device.split(":"))
            return (int(offset, 16) + address - start, (os.makedev(major, minor), int(inode))) if is_shared else None
    return None


def _open_at_parent(file: tuple[int, int]) -> int | None:
    """Open the file with this device and inode through the parent process, which has it open.

    The inode alone is not enough: soon after a machine has started, it can be that of /dev/null.
    """
    for entry in Path(f"/proc/{os.getppid()}/fd").iterdir():
        with suppress(OSError):
            found = entry.stat()
            if (found.st_dev, found.st_ino) == file:
                return os.open(entry, os.O_RDONLY)
    return None
