"""Memory that the main process and its workers share: blocks of one size, and which of them are in use.

The memory has no name (a memfd). It ends with its last process, so a killed run leaves nothing in /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from quorate.engines.shared.buffers import BufferSlots
from quorate.errors import BadInput
from quorate.flat import Flat, Layout

#: Formats in which workers may store gradients.
WIRES = ("fp32", "bf16")
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


def anonymous_file(name: str) -> int:
    """Open a file without a name, in memory if the system has memfd; returns its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class BlockLayout:
    """The layout of a block: parameters (or a gradient), buffers, and a mask with one byte per parameter.

    The mask says which parameters have a gradient. A gradient on a 16-bit wire has the same elements in the same
    order, as bfloat16. A block of a shard holds one `part` of the parameters; the first shard holds the buffers.
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
    """Blocks of equal size in one anonymous file. The main process adds blocks; each process maps those it uses."""

    def __init__(self, descriptor: int, block_bytes: int) -> None:
        self.descriptor, self.block_bytes = descriptor, block_bytes
        self.count = 0
        self._mapped: dict[int, Tensor] = {}

    def add(self) -> int:
        """Add a block of zeros. Its memory is allocated now, so that a later write cannot fail."""
        number = self.count
        offset = number * self.block_bytes
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, offset, self.block_bytes)
        else:
            os.ftruncate(self.descriptor, offset + self.block_bytes)
        self.count += 1
        return number

    def block(self, number: int) -> Tensor:
        """The bytes of a block, mapped on first use."""
        found = self._mapped.get(number)
        if found is None:
            found = self._mapped[number] = mapped(self.descriptor, self.block_bytes, number * self.block_bytes)
        return found

    def forget(self) -> None:
        """Unmap all blocks, except those that tensors still refer to."""
        self._mapped.clear()


def mapped(descriptor: int, length: int, offset: int = 0) -> Tensor:
    """Bytes of a file as a tensor, shared by all processes that map them."""
    return torch.frombuffer(mmap.mmap(descriptor, length, offset=offset), dtype=torch.uint8)


class ControlWords:
    """A few shared words for each worker, which both sides read and write without a system call."""

    WORDS = 8  # a cache line per worker, to avoid false sharing
    TICKET, CANCELLED_AT, STAGE = 0, 1, 2

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, self.size(workers))
        self.words = memoryview(self._memory).cast("q")

    @classmethod
    def size(cls, workers: int) -> int:
        return -(-workers * cls.WORDS * 8 // PAGE_BYTES) * PAGE_BYTES

    def close(self) -> None:
        self.words.release()
        self._memory.close()


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def available_bytes() -> int | None:
    """Available memory of the machine, or of the container if it has a lower limit; None if unknown."""
    found = [size for size in (_machine_free(), _container_free()) if size is not None]
    return min(found) if found else None


def _machine_free() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_free() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        counters = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        # The page cache of files (inactive_file) counts as used, but the kernel reclaims it on demand.
        return None if limit == "max" else int(limit) - used + int(counters.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


class Block:
    """One block with views of its contents: the parameters of a version, or a gradient."""

    def __init__(self, number: int, layout: BlockLayout, memory: Tensor) -> None:
        self.number = number
        self.flat = Flat(layout.params, torch.device("cpu"), layout.params_of(memory))
        self.runs = layout.params.runs(self.flat.buffer)
        self.gradient_views = layout.gradient.views(layout.gradient_of(memory))
        self.gradient_runs = layout.gradient.runs(layout.gradient_of(memory))
        self.buffers = layout.buffers.views(layout.buffers_of(memory))
        self.mask = layout.mask_of(memory)
        self._gradient = layout.gradient_of(memory)
        self._same_layout = layout.gradient is layout.params
        self._was_version = False

    def become(self, gradient: bool) -> None:
        """Set the role of the block.

        On a 16-bit wire, bytes of an old parameter may lie in the padding of a gradient and read as NaN.
        """
        if gradient and self._was_version and not self._same_layout:
            self._gradient.zero_()
        self._was_version = not gradient

    def set_buffers(self, buffers: Sequence[Tensor]) -> None:
        for mine, given in zip(self.buffers, buffers, strict=True):
            mine.copy_(given)


class Holds:
    """Reference counts of blocks. A block whose count falls to zero is free."""

    def __init__(self) -> None:
        self.count = 0  # all blocks, used and free
        self._free: list[int] = []
        self._holds: Counter[int] = Counter()
        self._last_block: dict[int, int] = {}  # by worker; its pages are mapped and in the cache

    def take(self, worker: int | None = None) -> int | None:
        """A free block, with a count of one, for this worker's gradient or for a version; None if none is free."""
        if not self._free:
            return None
        last = -1 if worker is None else self._last_block.get(worker, -1)
        number = self._free.pop(self._free.index(last) if last in self._free else -1)
        if worker is not None:
            self._last_block[worker] = number
        self._holds[number] = 1
        return number

    def add(self) -> None:
        """Add a free block."""
        self._free.append(self.count)
        self.count += 1

    def hold(self, number: int) -> None:
        self._holds[number] += 1

    def held_more_than_once(self, number: int) -> bool:
        return self._holds[number] > 1

    def release(self, number: int) -> None:
        self._holds[number] -= 1
        if not self._holds[number]:
            self._free.append(number)

    @property
    def in_use(self) -> int:
        """The number of blocks that are not free."""
        return self.count - len(self._free)


class BlockStore:
    """Allocates blocks, counts references to them, and reuses free ones."""

    def __init__(self, layout: BlockLayout, blocks: Blocks) -> None:
        self._layout, self._blocks = layout, blocks
        self._all: list[Block] = []
        self._holds = Holds()

    def take(self, worker: int | None = None) -> Block:
        """A free block, with a count of one, for this worker's gradient or for a version."""
        number = self._holds.take(worker)
        if number is None:
            self._add()
            number = self._holds.take(worker)
            assert number is not None
        self._all[number].become(gradient=worker is not None)
        return self._all[number]

    def _add(self) -> None:
        try:
            number = self._blocks.add()
        except OSError as error:
            size = gigabytes(self._blocks.block_bytes)
            raise BadInput(
                f"no memory for another block of {size} beside the {len(self._all)} there are: {error.strerror}; "
                f"take fewer workers, or a policy that keeps fewer versions alive"
            ) from error
        self._all.append(Block(number, self._layout, self._blocks.block(number)))
        self._holds.add()

    def hold(self, block: Block) -> None:
        self._holds.hold(block.number)

    def held_more_than_once(self, block: Block) -> bool:
        return self._holds.held_more_than_once(block.number)

    def release(self, block: Block) -> None:
        self._holds.release(block.number)

    def close(self) -> None:
        self._all.clear()
        self._blocks.forget()
