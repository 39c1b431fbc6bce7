"""What actors are told of a run, and how tensors go into Ray's objects: as plain arrays of bytes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quorate._tensor_state import pack, unpack
from quorate.engines.ray.segment import SegmentAddress
from quorate.learner import Learning


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every actor of a run is made with."""

    seed: int
    threads: int
    wire: str
    device: str
    batch_size: int
    samples: int | None
    learning: Learning
    look_through: bool  # whether workers look through their gradients for NaN
    argv: tuple[str, ...]  # a script may read them as it is imported


@dataclass(frozen=True)
class Cut:
    """How the model is cut, and where the memory of each shard is."""

    parts: tuple[slice, ...]
    segments: tuple[SegmentAddress, ...]


def as_array(memory: Tensor) -> Any:
    """Bytes, as Ray carries them without a pickle."""
    return memory.numpy()


def as_tensor(array: Any) -> Tensor:
    """The bytes of an object, in place. They are read-only, which torch has no word for: nobody may write to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def pack_state(state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A state as JSON values and arrays of bytes."""
    packed, tensors = pack(state)
    return packed, {
        name: (str(one.dtype).removeprefix("torch."), tuple(one.shape), as_array(_bytes_of(one)))
        for name, one in tensors.items()
    }


def unpack_state(packed: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `pack_state`; the tensors are copies."""
    tensors = {
        name: as_tensor(array).clone().view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, array) in arrays.items()
    }
    state = unpack(packed, tensors)
    assert isinstance(state, dict)
    return state


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().clone().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
