"""Gradients become one: summed in pieces that fit the cache, by as many threads as there are cores.

Eight gradients added one after the other would each read and write the whole sum. Here a piece of the sum stays in
the cache until all eight are in it, and for plain SGD also until the new parameters are made of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from quorate.engines.processes.memory import BlockLayout
from quorate.flat import Flat

#: Elements of a piece: measured, as few calls as keep it and one of a gradient in the cache.
PIECE = 1 << 18
#: Fewer pieces than this are not worth waking a thread.
_FEW = 4
_MOST_THREADS = 8  # memory is no faster with more


class Source(NamedTuple):
    """One gradient, as long vectors, and what it is multiplied with."""

    runs: Sequence[Tensor]
    scale: float


class Averager:
    """Keeps the running sum, and turns arrivals into a mean or straight into the next version."""

    def __init__(self, layout: BlockLayout) -> None:
        self.sum = Flat(layout.params, torch.device("cpu"))
        self._sum_runs = layout.params.runs(self.sum.buffer)
        self._pieces = [
            (run, start, min(start + PIECE, vector.numel()))
            for run, vector in enumerate(self._sum_runs)
            for start in range(0, vector.numel(), PIECE)
        ]
        self._helpers = min(len(os.sched_getaffinity(0)), _MOST_THREADS) - 1 if len(self._pieces) > _FEW else 0
        self._threads: ThreadPoolExecutor | None = None
        self.seconds_per_gradient = layout.params.nbytes * 1e-10  # a first guess; measured from then on

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    @property
    def is_large(self) -> bool:
        """Whether summing takes long enough to be worth doing ahead."""
        return len(self._pieces) > _FEW

    # ------------------------------------------------------------ what can be made of gradients

    def fold(self, sources: Sequence[Source], begun: bool) -> None:
        """Add these to the sum ahead of time; `begun`: there is something in it already."""
        started = perf_counter()
        for run, start, stop in self._pieces:  # no threads: the other cores have work
            _add_up(self._sum_runs[run][start:stop], sources, run, start, stop, begun)
        self.seconds_per_gradient = (perf_counter() - started) / len(sources)

    def average(self, sources: Sequence[Source], total: float, begun: bool) -> bool:
        """The mean into `sum`; False if it is not finite."""

        def piece(run: int, start: int, stop: int) -> bool:
            mine = self._sum_runs[run][start:stop]
            _add_up(mine, sources, run, start, stop, begun)
            if total != 1.0:
                mine.div_(total)
            return _finite(mine)

        return self._each_piece(piece)

    def descend(
        self,
        sources: Sequence[Source],
        total: float,
        begun: bool,
        old: Sequence[Tensor],
        new: Sequence[Tensor],
        rate: float,
    ) -> bool:
        """new = old − rate · mean, in one go; False if the mean is not finite, and `new` is then of no use."""

        def piece(run: int, start: int, stop: int) -> bool:
            mine = torch.empty(stop - start, dtype=old[run].dtype)  # small enough to come from torch's own reserve
            if begun:
                mine.copy_(self._sum_runs[run][start:stop])
            _add_up(mine, sources, run, start, stop, begun)
            if total != 1.0:
                mine.div_(total)
            torch.add(old[run][start:stop], mine, alpha=-rate, out=new[run][start:stop])
            return _finite(mine)

        return self._each_piece(piece)

    def copy(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        def piece(run: int, start: int, stop: int) -> bool:
            new[run][start:stop].copy_(old[run][start:stop])
            return True

        self._each_piece(piece)

    # ------------------------------------------------------------ threads

    def _each_piece(self, work: Callable[[int, int, int], bool]) -> bool:
        """Do it for every piece, stopping at the first that says no."""
        todo = iter(self._pieces)
        if not self._helpers:
            return _work_through(todo, work)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._helpers, "quorate-sum")
        others = [self._threads.submit(_work_through, todo, work) for _ in range(self._helpers)]
        mine = _work_through(todo, work)
        theirs = [other.result() for other in others]  # waits for all of them
        return mine and all(theirs)


def _work_through(todo: Iterator[tuple[int, int, int]], work: Callable[[int, int, int], bool]) -> bool:
    return all(work(*piece) for piece in todo)  # taking the next from a list's iterator is atomic


def _add_up(into: Tensor, sources: Sequence[Source], run: int, start: int, stop: int, begun: bool) -> None:
    """into = Σ scale·gradient in this order, or += where it has begun."""
    rest = sources
    if not begun:
        first = sources[0].runs[run][start:stop]
        if sources[0].scale == 1.0 and len(sources) > 1 and first.dtype == into.dtype:
            torch.add(first, sources[1].runs[run][start:stop], alpha=sources[1].scale, out=into)
            rest = sources[2:]
        else:
            into.copy_(first)
            if sources[0].scale != 1.0:
                into.mul_(sources[0].scale)
            rest = sources[1:]
    for runs, scale in rest:
        into.add_(runs[run][start:stop], alpha=scale)


def _finite(vector: Tensor) -> bool:
    return math.isfinite(vector.sum().item()) or bool(torch.isfinite(vector).all())
