"""Batches loaded ahead: while a worker computes one, the next is fetched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from quorate.engines._batches import Batches

#: Loading that is quicker than this is not worth a thread.
WORTH_A_THREAD_S = 0.0005
_LOOKS = 3  # batches to look at before deciding
_CHECK_EVERY_S = 0.002


class Loader:
    """Gives a batch by its number, ready where it was foreseen.

    A data set that draws from torch's generator shares it with the model, and is loaded when its turn comes, so that
    the draws are the same as anywhere else. Others are loaded by a thread; it alone then touches the data set.
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
        """The batch, with the random numbers that follow its loading; `check` is called while it waits."""
        loaded = None
        if self._thread is not None:
            loaded = self._take(batch, check)
        if loaded is None:
            return self._load_now(batch, check)
        self._batches.seed(batch)
        if isinstance(loaded, _Failed):
            raise loaded.error
        return loaded

    def expect(self, batch: int) -> None:
        """This batch is likely to be asked for next."""
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
            with self._condition:  # the data set is used by one at a time
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
            self._ready.clear()  # what was foreseen wrongly will hardly be right later
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
                loaded = _Failed(error)  # told when somebody asks for it, if ever
            with self._condition:
                self._ready[batch] = loaded
                self._loading = None
                self._condition.notify_all()


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error
