"""One table from the rows of all processes, without a collective: a process may be gone, and nobody must hang for it.

Rows go over the process group's store (the key-value store that the processes found each other with), as plain
bytes of doubles, never pickled. Process 0 says whether it has written the whole table.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CHUNK_BYTES = 1 << 19  # the store's messages have a limit of some megabytes
_GONE, _WHOLE, _PARTS = b"gone", b"whole", b"parts"
_FAREWELL_S = 20.0  # the store may live in process 0, which therefore leaves last


class Place:
    """Which process this is, among how many."""

    def __init__(self, worker: int, workers: int) -> None:
        self.worker, self.workers = worker, workers

    @classmethod
    def here(cls) -> Place:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        # Started by torchrun, but without a process group (yet).
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class Meeting:
    """The end of a measured block, where the processes that are still there bring their rows together."""

    def __init__(self, name: str, place: Place, wait_s: float) -> None:
        self._name, self._place = name, place
        self._until = time.monotonic() + wait_s

    def bring(self, seconds: array[float]) -> list[array[float]] | None:
        """Process 0 gets all rows; it must say with `announce` whether they are on disk. The others get None."""
        store = self._store()
        data = seconds.tobytes()
        chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            store.set(f"{self._place.worker}/{number}", chunk)
        store.set(f"{self._place.worker}", str(len(chunks)))
        if self._place.worker != 0:
            return None
        return [seconds, *(self._rows_of(store, worker) for worker in range(1, self._place.workers))]

    def _rows_of(self, store: Any, worker: int) -> array[float]:
        header = self._wait_for(store, f"{worker}")
        if header == _GONE:
            raise RuntimeError(f"process {worker} left the block with an error")
        rows = array("d")
        for number in range(int(header)):
            rows.frombytes(store.get(f"{worker}/{number}"))
        return rows

    def announce(self, whole: bool) -> None:
        """Process 0 tells the others what came of it, and sees that they have heard it."""
        with suppress(RuntimeError, ValueError):
            store = self._store()
            store.set("verdict", _WHOLE if whole else _PARTS)
            if whole:
                heard = [f"{worker}/heard" for worker in range(1, self._place.workers)]
                store.wait(heard, timedelta(seconds=_FAREWELL_S))

    def heard_that_it_is_whole(self) -> bool:
        store = self._store()
        whole = self._wait_for(store, "verdict") == _WHOLE
        store.set(f"{self._place.worker}/heard", b"")
        return whole

    def miss(self) -> None:
        """This process leaves with an error: the others need not wait for it."""
        with suppress(RuntimeError, ValueError):
            store = self._store()
            store.set(f"{self._place.worker}", _GONE)
            if self._place.worker == 0:
                store.set("verdict", _PARTS)

    def _wait_for(self, store: Any, key: str) -> bytes:
        store.wait([key], timedelta(seconds=max(0.01, self._until - time.monotonic())))
        value: bytes = store.get(key)
        return value

    def _store(self) -> Any:
        if not dist.is_initialized():
            raise RuntimeError("there is no process group any more")
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        return PrefixStore(self._name, _get_default_store())


def as_lines(rows: Sequence[array[float]], workers: Sequence[int]) -> Iterator[str]:
    """The table's lines: by step, then by worker; steps that could not be measured are left out."""
    yield "step,worker,seconds\n"
    for step in range(max(map(len, rows), default=0)):
        for worker, seconds in zip(workers, rows, strict=True):
            if step < len(seconds) and seconds[step] == seconds[step]:
                yield f"{step},{worker},{seconds[step]:.9g}\n"
