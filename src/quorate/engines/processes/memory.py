"""Memory that the main process and its workers share: blocks of one size, mapped where they are used.

It has no name (a memfd), so nothing is left in /dev/shm whatever is killed: it is gone with its last process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

import torch
from torch import Tensor, nn

from quorate.engines._buffers import BufferSlots
from quorate.flat import Layout

#: How gradients may be stored on their way.
WIRES = ("fp32", "bf16")
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


def anonymous_file(name: str) -> int:
    """A file without a name, in memory where the system can do that; gives its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class BlockLayout:
    """What is in a block: parameters (or a gradient), buffers, and one byte a parameter that says if it is there.

    A gradient on a 16-bit wire has the same elements at the same places, as bfloat16. Where the model is cut into
    shards, a block is of one `part` of the parameters, and the buffers are in that of the first.
    """

    def __init__(self, model: nn.Module, wire: str, part: slice = slice(None)) -> None:
        params = [parameter for parameter in model.parameters() if parameter.requires_grad][part]
        buffers = [] if part.start else BufferSlots(model).tensors()
        self.params = Layout(params)
        self.gradient = self.params if wire == "fp32" else self.params.halved()
        self.buffers = Layout(buffers)
        self.count = len(params)
        self._mask_at = self.params.nbytes + self.buffers.nbytes
        self.nbytes = -(-(self._mask_at + self.count) // PAGE_BYTES) * PAGE_BYTES

    def params_of(self, block: Tensor) -> Tensor:
        return block[: self.params.nbytes]

    def gradient_of(self, block: Tensor) -> Tensor:
        return block[: self.gradient.nbytes]

    def buffers_of(self, block: Tensor) -> Tensor:
        return block[self.params.nbytes : self._mask_at]

    def mask_of(self, block: Tensor) -> Tensor:
        return block[self._mask_at : self._mask_at + self.count]


class Blocks:
    """Blocks of equal size in one anonymous file. The main process adds them, everyone maps those it uses."""

    def __init__(self, descriptor: int, block_bytes: int) -> None:
        self.descriptor, self.block_bytes = descriptor, block_bytes
        self.count = 0
        self._mapped: dict[int, Tensor] = {}

    def add(self) -> int:
        """One more block, filled with zeros; its memory is set aside now, so that it cannot be missing later."""
        number = self.count
        offset = number * self.block_bytes
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, offset, self.block_bytes)
        else:
            os.ftruncate(self.descriptor, offset + self.block_bytes)
        self.count += 1
        return number

    def block(self, number: int) -> Tensor:
        """The bytes of a block."""
        found = self._mapped.get(number)
        if found is None:
            found = self._mapped[number] = mapped(self.descriptor, self.block_bytes, number * self.block_bytes)
        return found

    def forget(self) -> None:
        """Unmap everything; tensors that still refer to a block keep it."""
        self._mapped.clear()


def mapped(descriptor: int, length: int, offset: int = 0) -> Tensor:
    """Bytes of a file as a tensor, shared with everyone who maps them."""
    memory = mmap.mmap(descriptor, length, offset=offset)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Control:
    """A few words for each worker that both sides see at once, without a system call."""

    WORDS = 8  # a cache line each, so that writers do not disturb one another
    TICKET, CANCELLED_AT, STAGE = 0, 1, 2

    def __init__(self, descriptor: int, workers: int) -> None:
        memory = mmap.mmap(descriptor, self.size(workers))
        self.words = memoryview(memory).cast("q")
        self._release = weakref.finalize(self, _close, self.words, memory)

    @classmethod
    def size(cls, workers: int) -> int:
        return -(-workers * cls.WORDS * 8 // PAGE_BYTES) * PAGE_BYTES

    def close(self) -> None:
        self._release()


def _close(words: memoryview, memory: mmap.mmap) -> None:
    words.release()
    memory.close()


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def available_bytes() -> int | None:
    """Memory that can still be had: what the machine has free, or less where a container sets a limit."""
    found = [size for size in (_machine_free(), _container_free()) if size is not None]
    return min(found) if found else None


def _machine_free() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - a file of the kernel
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _container_free() -> int | None:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:  # noqa: PTH123
            text = limit.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as used:  # noqa: PTH123
            taken = int(used.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as stat:  # noqa: PTH123
            kept = dict(line.split() for line in stat)  # files that were read: given up when memory is wanted
        return None if text == "max" else int(text) - taken + int(kept.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
