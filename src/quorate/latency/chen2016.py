"""The stragglers that Chen et al. measured on 100 workers, drawn jointly so that every k-th arrival is right.

Per round one level u: the k-th fastest of the 100 takes Q_k(u), and ranks are shuffled over the workers.
Independent draws from the pooled times would make the k-th arrival far too regular: real rounds share their
slowness. Figure 3 of the paper gives Q_k for seven k, figure 4 the mean for all.
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
from quorate.latency.base import Draw, Latency
from quorate.seeds import GOLDEN64, MASK64, derive, mix64

WORKERS = 100
# All levels that were read off are hundredths, so straight lines on this grid hold every curve exactly.
CELLS = 100

# Read off, figure 3 lies 0.02 to 0.03 s below figure 4, in the medians as in the means, at every k below
# 100. So each of these curves is lifted, except for what a common excess in the last hundredth of rounds
# explains; this much of it leaves all curves within 1.5 % of both figures. Were each gap put there alone,
# k=97 would overtake k=98.
EXCESS_S = 0.75
# At k=100 the gap is the heavy tail; the curve moves only by the accuracy of the reading.
LIFT_LAST_S = 0.015

POOL = 1024
_SEATINGS = POOL * WORKERS
_LAST_CELL = CELLS - 1
_STEP, _HALF_STEP = CELLS * 2.0**-52, CELLS * 2.0**-53


@cache
def chen2016_figures() -> dict[str, Any]:
    """The figures read off the paper; their source is inside."""
    text = files("quorate").joinpath("data", "chen2016.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


class _Tail(NamedTuple):
    """The slowest worker in the last hundredth of rounds: start · (1 + (1-v)² v^-power), v = (1-u)/0.01.

    A Pareto tail of index 1/power that sets in gently, so that the 99 % quantile stays where it was read;
    below v = least nothing more is added, which caps it.
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
    """The power at which the tail has this mean and this cap, by halving: the mean rises with the power."""
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
    # k=100 beyond it; all others rise together above their value there
    at_99: list[float]
    tail: _Tail

    def top(self, k: int, level: float) -> float:
        """Q_k in the last hundredth; level = 100u."""
        if k == WORKERS:
            return self.tail.at(CELLS - level)
        # 3s² has the mean 1 over the hundredth, and like the tail it sets in gently.
        return self.at_99[k - 1] + EXCESS_S * 3.0 * (level - (CELLS - 1)) ** 2


@cache
def _means() -> list[float]:
    """Mean seconds until the k-th gradient, k = 1 … 100 at index k-1: figure 4, straight lines between."""
    figure = chen2016_figures()["fig4_mean_time_to_kth_gradient_s"]
    read = sorted((int(k), mean) for k, mean in figure.items())
    means = [read[0][1]]
    for (k1, mean1), (k2, mean2) in pairwise(read):
        means += [mean1 + (mean2 - mean1) * (k - k1) / (k2 - k1) for k in range(k1 + 1, k2 + 1)]
    return means


def _grid(levels: list[float], seconds: list[float]) -> list[float]:
    """One read-off curve at the levels 0, 0.01, … 0.99; below the first level its first slope goes on."""
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

    # Between two curves that were read, a mixture that has figure 4's mean: it lies between them everywhere.
    grids = [read[0][1]]
    for (k1, grid1), (k2, grid2) in pairwise(read):
        for k in range(k1 + 1, k2 + 1):
            w = (means[k - 1] - means[k1 - 1]) / (means[k2 - 1] - means[k1 - 1])
            grids.append([(1 - w) * a + w * b for a, b in zip(grid1, grid2, strict=True)])
    offset: list[float] = []
    slope: list[float] = []
    for grid in grids:
        # The last cell is never looked up, but keeps j simple.
        for cell, (low, high) in enumerate(pairwise([*grid, grid[-1]])):
            slope.append(high - low)
            offset.append(low - cell * (high - low))
    return _Curves(offset, slope, [grid[-1] for grid in grids], tail)


@cache
def _seatings() -> bytes:
    """POOL random orders of the ranks 0 … 99, each written twice so that a rotation is a plain offset.

    The same for all seeds: which of the 102,400 a round takes is what the seed decides.
    """
    rng = random.Random(20160404)
    pool = bytearray()
    for _ in range(POOL):
        # Only random() is promised to be the same in every Python.
        order = bytes(sorted(range(WORKERS), key=lambda _: rng.random()))
        pool += order + order
    return bytes(pool)


@dataclass(frozen=True)
class Chen2016(Latency):
    """Inception on 100 K40 workers; workers beyond 100 form further such groups, fewer are a random subset.

    The mean time of the 100th is 2.62 s, its standard deviation 2.0 s (a rare round takes up to 310 s), so
    the mean over 10,000 rounds has a standard error of 0.8 %: 3 % off is four of them.
    """

    name: ClassVar[str] = "chen2016"
    form: ClassVar[str] = "chen2016"
    example: ClassVar[str] = "chen2016"

    def sampler(self, seed: int, workers: int) -> Draw:
        curves, pool = _curves(), _seatings()
        offset, slope, top = curves.offset, curves.slope, curves.top
        rounds = [derive(seed, "latency.chen2016", worker // WORKERS) for worker in range(workers)]
        seats = [worker % WORKERS for worker in range(workers)]

        def draw(worker: int, _step: int, row: int, _time_s: float) -> float:
            bits = mix64((rounds[worker] + row * GOLDEN64) & MASK64)
            # The remainder turns on the lowest bits and the level on the highest: the two are independent.
            pick = bits % _SEATINGS
            rank = pool[pick + pick // WORKERS * WORKERS + seats[worker]]
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
        if not 0.0 < u < 1.0:
            raise BadInput(f"level {u!r} is not between 0 and 1; give a share such as 0.5 for the median")
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
