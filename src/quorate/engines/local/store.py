"""Which block holds what: versions that somebody reads, gradients that wait, and blocks that are free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from quorate.engines.local.memory import BlockLayout, Blocks, gigabytes
from quorate.errors import BadInput
from quorate.flat import Flat


class Block:
    """One block as the main process sees it: parameters of a version, or a gradient."""

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
        """Change role. On a 16-bit wire, what was a parameter may lie in a gradient's padding, and be no number."""
        if gradient and self._was_version and not self._same_layout:
            self._gradient.zero_()
        self._was_version = not gradient

    def set_buffers(self, buffers: Sequence[Tensor]) -> None:
        for mine, given in zip(self.buffers, buffers, strict=True):
            mine.copy_(given)


class Store:
    """Hands out blocks. A block comes back when nobody reads it any more."""

    def __init__(self, layout: BlockLayout, blocks: Blocks) -> None:
        self._layout, self._blocks = layout, blocks
        self._all: list[Block] = []
        self._free: list[int] = []
        self._holds: Counter[int] = Counter()  # block -> for how many reasons it is kept
        self._home: dict[int, int] = {}  # worker -> the block it last wrote: its pages are mapped and warm

    def take(self, worker: int | None = None) -> Block:
        """A block that nobody uses, held once: for this worker's gradient, or for a version."""
        home = self._home.get(worker, -1) if worker is not None else -1
        if home in self._free:
            number = home
            self._free.remove(home)
        elif self._free:
            number = self._free.pop()
        else:
            number = self._add()
        if worker is not None:
            self._home[worker] = number
        self._holds[number] = 1
        self._all[number].become(gradient=worker is not None)
        return self._all[number]

    def _add(self) -> int:
        try:
            number = self._blocks.add()
        except OSError as error:
            size = gigabytes(self._blocks.block_bytes)
            raise BadInput(
                f"no memory for another block of {size} beside the {len(self._all)} there are: {error.strerror}; "
                f"take fewer workers, or a policy that keeps fewer versions alive"
            ) from error
        self._all.append(Block(number, self._layout, self._blocks.block(number)))
        return number

    def hold(self, block: Block) -> None:
        """One more reason to keep this block."""
        self._holds[block.number] += 1

    def held_more_than_once(self, block: Block) -> bool:
        return self._holds[block.number] > 1

    def release(self, block: Block) -> None:
        """One reason less."""
        self._holds[block.number] -= 1
        if not self._holds[block.number]:
            self._free.append(block.number)

    def close(self) -> None:
        self._all.clear()
        self._blocks.forget()
