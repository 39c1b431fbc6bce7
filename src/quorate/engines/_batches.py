"""From the number of a batch to its samples, and to the randomness that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quorate.ledger import Ledger
from quorate.seeds import GOLDEN64, MASK64, derive, mix64
from quorate.task import BoundTask


class Batches:
    """Loads batches by their number.

    A batch's randomness (dropout, augmentation) is seeded by the batch, so that it is the same on any engine,
    in any order and on any retry. Of batches that are computed as one, or side by side, it is the first one's.
    """

    def __init__(self, task: BoundTask, ledger: Ledger, seed: int, device: torch.device) -> None:
        self.task, self.ledger, self.device = task, ledger, device
        task.on_device(device)
        self._seed = derive(seed, "batch")
        self._epochs: dict[int, _Epoch] = {}  # the newest few

    def seed(self, batch: int) -> None:
        """Let the randomness of this batch begin."""
        seed = mix64((self._seed + batch * GOLDEN64) & MASK64) >> 1
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    def load(self, batches: Sequence[int]) -> Any:
        """The samples of these batches as one, on the device."""
        return self.task.batch(self.samples(batches), self.device)

    def samples(self, batches: Sequence[int]) -> Tensor:
        """Indices of the samples in these batches, where the data is."""
        ledger = self.ledger
        per_epoch = ledger.batches_per_epoch
        if per_epoch is None:
            return torch.tensor([index for batch in batches for index in ledger.indices(batch)])
        if len(batches) == 1:
            return self._epoch(batches[0] // per_epoch).batches[batches[0] % per_epoch]
        pieces = []
        for first, last in _runs(batches, per_epoch):
            start = first % per_epoch * ledger.batch_size
            stop = start + (last - first + 1) * ledger.batch_size
            pieces.append(self._epoch(first // per_epoch).order[start:stop])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _epoch(self, epoch: int) -> _Epoch:
        found = self._epochs.get(epoch)
        if found is None:
            order = self.ledger.order(epoch, self.task.index_device)
            found = self._epochs[epoch] = _Epoch(order, self.ledger.batch_size)
            if len(self._epochs) > 3:  # a straggler may still hold a batch of the epoch before
                del self._epochs[min(self._epochs)]
        return found


class _Epoch:
    """The order of the samples in an epoch; its batches as slices of it."""

    def __init__(self, order: Tensor, batch_size: int) -> None:
        self.order, self._batch_size = order, batch_size

    @cached_property
    def batches(self) -> tuple[Tensor, ...]:
        return torch.split(self.order, self._batch_size)


def _runs(batches: Sequence[int], per_epoch: int) -> list[tuple[int, int]]:
    """Runs of neighbouring batches of one epoch, as (first, last): each is one slice of the epoch's order."""
    runs: list[tuple[int, int]] = []
    for batch in batches:
        if runs and batch == runs[-1][1] + 1 and batch % per_epoch:
            runs[-1] = (runs[-1][0], batch)
        else:
            runs.append((batch, batch))
    return runs
