"""The stragglers that Chen et al. measured on 100 workers, drawn jointly so that every k-th arrival matches.

Each round draws one level u. The k-th fastest of the 100 workers takes Q_k(u), and ranks are shuffled over the workers.
Independent draws from the pooled times would make the k-th arrival far too regular, because in real rounds workers
are slow together. Figure 3 of the paper gives Q_k for seven values of k, figure 4 the mean for all.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from quorate.errors import BadInput
from quorate.latency.base import Draw, Latency, check_level
from quorate.seeds import GOLDEN64, MASK64, derive, mix64

WORKERS = 100
# All levels read off the figure are hundredths, so straight lines on this grid represent every curve exactly.
CELLS = 100

# The values read off figure 3 are 0.02 to 0.03 s below those of figure 4, in medians and means, for every k below
# 100. A common excess time in the slowest hundredth of rounds explains a part of this gap; each curve is lifted by the
# rest. With this excess all curves are within 1.5 % of both figures. If the excess alone closed each gap, k=97 would
# overtake k=98.
EXCESS_S = 0.75
# At k=100 the heavy tail explains the gap; this curve is lifted only by the accuracy of the reading.
LIFT_LAST_S = 0.015

POOL = 1024
_ASSIGNMENTS = POOL * WORKERS
_LAST_CELL = CELLS - 1
_STEP, _HALF_STEP = CELLS * 2.0**-52, CELLS * 2.0**-53


@cache
def chen2016_figures() -> dict[str, Any]:
    """The figures read off the paper, with their source."""
    text = files("quorate").joinpath("data", "chen2016.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


class _Tail(NamedTuple):
    """The slowest worker in the slowest hundredth of rounds: start · (1 + (1-v)² v^-power), v = (1-u)/0.01.

    A Pareto tail of index 1/power with a smooth start, so that the 99 % quantile keeps the value of the figure. Below
    v = least the power stays constant, which caps the tail.
    """

    start_s: float
    power: float
    least: float

    def at(self, v: float) -> float:
        return self.start_s * (1.0 + (1.0 - v) ** 2 * float(max(v, self.least) ** -self.power))

    def mean(self) -> float:
        g = self.power

        def integral(v: float) -> float:  # of (1-v)² v^-g
            return float(v ** (1 - g) / (1 - g) - 2 * v ** (2 - g) / (2 - g) + v ** (3 - g) / (3 - g))

        capped = float(self.least**-g) * (1 - (1 - self.least) ** 3) / 3
        return self.start_s * (1.0 + integral(1.0) - integral(self.least) + capped)


def _fit_tail(start_s: float, cap_s: float, mean_s: float) -> _Tail:
    """The tail with this mean and this cap, by bisection on the power; the mean rises with the power."""
    low, high = 0.0, 1.0
    for _ in range(50):
        power = (low + high) / 2
        tail = _Tail(start_s, power, (cap_s / start_s - 1.0) ** (-1.0 / power))
        low, high = (power, high) if tail.mean() < mean_s else (low, power)
    return tail


class _Curves(NamedTuple):
    """Q_k as straight lines up to level 0.99, at j = 100·(k-1) + int(100u): offset[j] + 100u·slope[j]."""

    offset: list[float]
    slope: list[float]
    at_99: list[float]  # Q_k(0.99); above it all curves but k=100 rise by the same excess
    tail: _Tail  # k=100 above level 0.99

    def top(self, k: int, level: float) -> float:
        """Q_k in the last hundredth; level = 100u."""
        if k == WORKERS:
            return self.tail.at(CELLS - level)
        # 3s² has the mean 1 over the hundredth and, like the tail, a smooth start.
        return self.at_99[k - 1] + EXCESS_S * 3.0 * (level - (CELLS - 1)) ** 2


@cache
def _means() -> list[float]:
    """Mean seconds until the k-th gradient, k = 1 … 100 at index k-1: figure 4, interpolated linearly."""
    figure = chen2016_figures()["fig4_mean_time_to_kth_gradient_s"]
    read = sorted((int(k), mean) for k, mean in figure.items())
    means = [read[0][1]]
    for (k1, mean1), (k2, mean2) in pairwise(read):
        means += [mean1 + (mean2 - mean1) * (k - k1) / (k2 - k1) for k in range(k1 + 1, k2 + 1)]
    return means


def _grid(levels: list[float], seconds: list[float]) -> list[float]:
    """One curve of figure 3 at the levels 0, 0.01, … 0.99; below the first level it is extrapolated linearly."""
    cells = [0, *(round(level * CELLS) for level in levels)]
    first = seconds[0] - (seconds[1] - seconds[0]) * levels[0] / (levels[1] - levels[0])
    grid = [first]
    for (i, low), (j, high) in pairwise(zip(cells, [first, *seconds], strict=True)):
        grid += [low + (high - low) * (cell - i) / (j - i) for cell in range(i + 1, j + 1)]
    return grid


@cache
def _curves() -> _Curves:
    figures, means = chen2016_figures(), _means()
    read: list[tuple[int, list[float]]] = []
    for name, seconds in figures["fig3_time_quantiles_s"].items():
        k = int(name)
        grid = _grid(figures["levels"], seconds)
        flat_mean = (sum(grid) - (grid[0] - grid[-1]) / 2) / CELLS
        gap = means[k - 1] - flat_mean
        lift = LIFT_LAST_S if k == WORKERS else gap - EXCESS_S / CELLS
        read.append((k, [value + lift for value in grid]))
        if k == WORKERS:
            start_s = grid[-1] + lift
            tail = _fit_tail(start_s, figures["fig3_max_observed_s"], start_s + (gap - lift) * CELLS)

    # Between two curves of figure 3, a mixture of them that has the mean of figure 4.
    grids = [read[0][1]]
    for (k1, grid1), (k2, grid2) in pairwise(read):
        for k in range(k1 + 1, k2 + 1):
            w = (means[k - 1] - means[k1 - 1]) / (means[k2 - 1] - means[k1 - 1])
            grids.append([(1 - w) * a + w * b for a, b in zip(grid1, grid2, strict=True)])
    offset: list[float] = []
    slope: list[float] = []
    for grid in grids:
        # The last cell is never used; it keeps the index j simple.
        for cell, (low, high) in enumerate(pairwise([*grid, grid[-1]])):
            slope.append(high - low)
            offset.append(low - cell * (high - low))
    return _Curves(offset, slope, [grid[-1] for grid in grids], tail)


@cache
def _assignments() -> bytes:
    """POOL random orders of the ranks 0 … 99, each stored twice so that a rotation is a plain offset.

    They are the same for all seeds. The seed decides which of the 102,400 rotated orders a round uses.
    """
    rng = random.Random(20160404)
    pool = bytearray()
    for _ in range(POOL):
        # Only random() is guaranteed to give the same numbers in every Python version.
        order = bytes(sorted(range(WORKERS), key=lambda _: rng.random()))
        pool += order + order
    return bytes(pool)


@dataclass(frozen=True)
class Chen2016(Latency):
    """Inception on 100 K40 workers. Workers beyond 100 form further groups of 100; fewer are a random subset.

    The 100th arrival has a mean of 2.62 s and a standard deviation of 2.0 s (a rare round takes up to 310 s). So the
    mean over 10,000 rounds has a standard error of 0.8 %; a deviation of 3 % is four standard errors.
    """

    name: ClassVar[str] = "chen2016"
    form: ClassVar[str] = "chen2016"
    example: ClassVar[str] = "chen2016"

    def sampler(self, seed: int, workers: int) -> Draw:
        curves, pool = _curves(), _assignments()
        offset, slope, top = curves.offset, curves.slope, curves.top
        rounds = [derive(seed, "latency.chen2016", worker // WORKERS) for worker in range(workers)]
        positions = [worker % WORKERS for worker in range(workers)]

        def draw(worker: int, _step: int, row: int, _time_s: float) -> float:
            bits = mix64((rounds[worker] + row * GOLDEN64) & MASK64)
            # The remainder depends on the lowest bits and the level on the highest, so the two are independent.
            pick = bits % _ASSIGNMENTS
            rank = pool[pick + pick // WORKERS * WORKERS + positions[worker]]
            level = (bits >> 12) * _STEP + _HALF_STEP
            cell = int(level)
            if cell == _LAST_CELL:
                return top(rank + 1, level)
            j = rank * CELLS + cell
            return offset[j] + level * slope[j]

        return draw

    def time_to(self, k: int, u: float) -> float:
        """Q_k(u): seconds until the k-th of 100 gradients in a round of level u, 0 < u < 1."""
        _check_k(k)
        check_level(u)
        curves, level = _curves(), u * CELLS
        if level >= _LAST_CELL:
            return curves.top(k, level)
        j = (k - 1) * CELLS + int(level)
        return curves.offset[j] + level * curves.slope[j]

    def mean_time_to(self, k: int) -> float:
        """Mean seconds until the k-th of 100 gradients."""
        _check_k(k)
        return _means()[k - 1]

    def mean(self) -> float:
        return sum(_means()) / WORKERS

    def longest(self) -> float:
        return float(chen2016_figures()["fig3_max_observed_s"])

    def text(self) -> str:
        return self.name


def _check_k(k: int) -> None:
    if not 1 <= k <= WORKERS:
        raise BadInput(f"k is {k!r}, but chen2016 measured 100 workers; give a k from 1 to 100")
