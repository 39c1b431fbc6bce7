"""Blocks by number: what is in one, and which are in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from quorate.engines.processes.memory import BlockLayout
from quorate.flat import Flat


class Block:
    """One block as the learner sees it: parameters of a version, or a gradient."""

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


class Holds:
    """Which blocks are in use, and for how many reasons each. A block is free when nobody reads it any more."""

    def __init__(self) -> None:
        self.count = 0  # blocks there are
        self._free: list[int] = []
        self._holds: Counter[int] = Counter()
        self._home: dict[int, int] = {}  # worker -> the block it last wrote: its pages are mapped and warm

    def take(self, worker: int | None = None) -> int | None:
        """A block that nobody uses, held once: for this worker's gradient, or for a version. None: there is none."""
        home = self._home.get(worker, -1) if worker is not None else -1
        if home in self._free:
            number = home
            self._free.remove(home)
        elif self._free:
            number = self._free.pop()
        else:
            return None
        if worker is not None:
            self._home[worker] = number
        self._holds[number] = 1
        return number

    def add(self) -> None:
        """There is one more block, and it is free."""
        self._free.append(self.count)
        self.count += 1

    def hold(self, number: int) -> None:
        """One more reason to keep this block."""
        self._holds[number] += 1

    def held_more_than_once(self, number: int) -> bool:
        return self._holds[number] > 1

    def release(self, number: int) -> None:
        """One reason less."""
        self._holds[number] -= 1
        if not self._holds[number]:
            self._free.append(number)

    @property
    def in_use(self) -> int:
        """How many blocks somebody holds."""
        return self.count - len(self._free)
