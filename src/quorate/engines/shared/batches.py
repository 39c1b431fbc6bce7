"""Batches by number: their samples, their random seed, and prefetching of the next batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quorate.ledger import Ledger
from quorate.seeds import GOLDEN64, MASK64, derive, mix64
from quorate.task import BoundTask


class Batches:
    """Loads batches by their number.

    The random numbers of a batch (dropout, augmentation) are seeded by its number, so that they are the same on any
    engine, in any order and on any retry. Batches computed as one, or in one vmapped call, use the seed of the first.
    """

    def __init__(self, task: BoundTask, ledger: Ledger, seed: int, device: torch.device) -> None:
        self.task, self.ledger, self.device = task, ledger, device
        task.on_device(device)
        self._seed = derive(seed, "batch")
        self._epochs: dict[int, _Epoch] = {}  # the newest few

    def seed(self, batch: int) -> None:
        """Seed torch's random generators for this batch."""
        seed = mix64((self._seed + batch * GOLDEN64) & MASK64) >> 1
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    def load(self, batches: Sequence[int]) -> Any:
        """The samples of these batches as one, on the device."""
        return self.task.batch(self.samples(batches), self.device)

    def samples(self, batches: Sequence[int]) -> Tensor:
        """Indices of the samples in these batches, on the device of the data set."""
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
    """The order of the samples in an epoch, and its batches as slices of it."""

    def __init__(self, order: Tensor, batch_size: int) -> None:
        self.order, self._batch_size = order, batch_size

    @cached_property
    def batches(self) -> tuple[Tensor, ...]:
        return torch.split(self.order, self._batch_size)


def _runs(batches: Sequence[int], per_epoch: int) -> list[tuple[int, int]]:
    """Runs of consecutive batches of one epoch, as (first, last): each is one slice of the epoch's order."""
    runs: list[tuple[int, int]] = []
    for batch in batches:
        if runs and batch == runs[-1][1] + 1 and batch % per_epoch:
            runs[-1] = (runs[-1][0], batch)
        else:
            runs.append((batch, batch))
    return runs


#: Batches that load faster than this are not prefetched.
WORTH_A_THREAD_S = 0.0005
_LOOKS = 3  # batches to measure before deciding
_CHECK_EVERY_S = 0.002


class Loader:
    """Loads batches by number, and prefetches the expected next batch in a thread.

    A data set that draws from torch's generator shares it with the model. It is not prefetched, so that the draws are
    the same as on any other engine. The thread and the caller never use the data set at the same time.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._looked = 0
        self._slowest_s = 0.0
        self._draws = False
        self._thread: threading.Thread | None = None
        self._condition = threading.Condition()
        self._wanted: int | None = None
        self._loading: int | None = None
        self._ready: dict[int, Any] = {}

    def get(self, batch: int, check: Callable[[], None]) -> Any:
        """The batch, with torch's generators as they are after loading it; calls `check` while it waits."""
        loaded = None if self._thread is None else self._take(batch, check)
        if loaded is None:
            return self._load_now(batch, check)
        self._batches.seed(batch)
        if isinstance(loaded, _Failed):
            raise loaded.error
        return loaded

    def expect(self, batch: int) -> None:
        """Prefetch this batch, if that pays off; -1: the next batch is unknown."""
        if batch < 0 or self._looked < _LOOKS or self._draws or self._slowest_s < WORTH_A_THREAD_S:
            return
        with self._condition:
            if batch in self._ready or batch == self._loading:
                return
            self._wanted = batch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quorate-loader", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def _load_now(self, batch: int, check: Callable[[], None]) -> Any:
        if self._thread is not None:
            with self._condition:  # the data set may not be thread-safe
                self._wanted = None
                while self._loading is not None:
                    check()
                    self._condition.wait(_CHECK_EVERY_S)
        self._batches.seed(batch)
        if self._looked >= _LOOKS:
            return self._batches.load([batch])
        before, started = torch.get_rng_state(), time.perf_counter()
        loaded = self._batches.load([batch])
        self._slowest_s = max(self._slowest_s, time.perf_counter() - started)
        self._draws = self._draws or not torch.equal(before, torch.get_rng_state())
        self._looked += 1
        return loaded

    def _take(self, batch: int, check: Callable[[], None]) -> Any | None:
        with self._condition:
            while self._loading == batch:
                check()
                self._condition.wait(_CHECK_EVERY_S)
            found = self._ready.pop(batch, None)
            self._ready.clear()  # a wrongly prefetched batch is unlikely to be needed later
            return found

    def _run(self) -> None:
        while True:
            with self._condition:
                while self._wanted is None:
                    self._condition.wait()
                batch = self._loading = self._wanted
                self._wanted = None
            try:
                loaded: Any = self._batches.load([batch])
            except Exception as error:
                loaded = _Failed(error)  # raised if the batch is asked for
            with self._condition:
                self._ready[batch] = loaded
                self._loading = None
                self._condition.notify_all()


class _Failed(NamedTuple):
    error: Exception
