"""Data that actors exchange: the run's configuration, and tensors, as Ray objects or in memory shared on a node.

An object in Ray's store costs 1.4 ms of CPU to make and 0.7 ms to read, whatever its size; a block that both processes
map costs nothing. The shared memory has no name in the file system, so nothing is left behind when processes are
killed. A process on the same node opens it through /proc of the process that owns it.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quorate.engines.shared.shared_memory import Blocks, anonymous_file
from quorate.learner import Learning
from quorate.tensor_state import pack, unpack


class SegmentAddress(NamedTuple):
    """Where processes on the same node find a shard's memory."""

    node: str
    pid: int
    descriptor: int
    name: str
    block_bytes: int


class Segment:
    """Shared memory in blocks of one size; a block is allocated on first use."""

    def __init__(self, descriptor: int, block_bytes: int) -> None:
        self._blocks = Blocks(descriptor, block_bytes)
        self._allocated: set[int] = set()

    def block(self, number: int) -> Tensor:
        """The bytes of a block."""
        if number not in self._allocated:
            # Reserve the memory now, so that a later write cannot fail for lack of it.
            os.posix_fallocate(self._blocks.descriptor, number * self._blocks.block_bytes, self._blocks.block_bytes)
            self._allocated.add(number)
        return self._blocks.block(number)

    def close(self) -> None:
        """Close the file; a block stays mapped while a tensor refers to it."""
        self._blocks.forget()
        os.close(self._blocks.descriptor)


def make_segment(node: str, block_bytes: int) -> tuple[Segment, SegmentAddress]:
    """Create memory owned by this process, with its address for other processes."""
    name = f"quorate-{secrets.token_hex(8)}"
    descriptor = anonymous_file(name)
    return Segment(descriptor, block_bytes), SegmentAddress(node, os.getpid(), descriptor, name, block_bytes)


def attach(address: SegmentAddress, node: str) -> Segment | None:
    """Open a shard's memory; None if the shard is on another node or its memory cannot be opened."""
    if address.node != node:
        return None
    path = Path(f"/proc/{address.pid}/fd/{address.descriptor}")
    try:
        # A process in another container may have the same pid; the random name tells them apart.
        if address.name not in str(path.readlink()):
            return None
        return Segment(os.open(path, os.O_RDWR | os.O_CLOEXEC), address.block_bytes)
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """Configuration that every actor of a run receives."""

    seed: int
    threads: int
    wire: str
    device: str
    batch_size: int
    samples: int | None
    learning: Learning
    look_through: bool  # whether workers check their gradients for NaN
    argv: tuple[str, ...]  # a script may read its arguments when it is imported


@dataclass(frozen=True)
class Cut:
    """How the model is split into shards, and where the memory of each shard is."""

    parts: tuple[slice, ...]
    segments: tuple[SegmentAddress, ...]

    def attach(self, old: Sequence[Segment | None], node: str) -> list[Segment | None]:
        """Close the old segments and open the ones that are on this node; None for shards on other nodes."""
        for segment in old:
            if segment is not None:
                segment.close()
        return [attach(address, node) for address in self.segments]


def read_blocks(segments: Sequence[Segment | None], block: int, objects: Sequence[Any]) -> list[Tensor]:
    """One block of every shard: from shared memory on this node, else from the objects, which are in shard order."""
    remote = iter(objects)
    return [segment.block(block) if segment is not None else as_tensor(next(remote)) for segment in segments]


def as_array(memory: Tensor) -> Any:
    """Bytes as a NumPy array, which Ray stores without pickling."""
    return memory.numpy()


def as_tensor(array: Any) -> Tensor:
    """The bytes of an object, without a copy. They are read-only, which torch cannot express: never write to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def pack_state(state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A state as JSON values and byte arrays."""
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
