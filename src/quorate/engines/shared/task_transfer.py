"""Pickling a task apart from its tensors: tensor memory travels as raw bytes, and the pickle only refers to it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


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
