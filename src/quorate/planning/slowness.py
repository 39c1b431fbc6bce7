"""Detection of workers that are always slow, as opposed to slow by chance.

A backup hides a worker that happens to be slow; it cannot make a machine faster. The gradient of a worker that is
always slow is dropped in every round: the worker computes for nothing, and uses up a backup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quorate.number_format import number, percent
from quorate.planning.world import Floats, World

_AT_LEAST = 1.2  # factor over the median worker; smaller factors are not reported
_BLOCKS = 8  # parts of the run; a slow worker is slow in nearly all of them
_ALWAYS = 0.85
_MOST_GAINS = 5  # slow workers whose gains are computed; each takes two plans


@dataclass(frozen=True, kw_only=True)
class SlowWorker:
    """A worker that is always slow, and the gain of two remedies."""

    worker: int
    factor: float  # over the median worker
    part: str | None  # data, compute or transfer; None if not measured
    is_bound: bool  # it hardly ever finished: the factor is a lower bound
    gain_removed: float | None  # relative gain in time to the target if it is removed
    gain_less_work: float | None  # relative gain if its batch shrinks by its factor
    of_two: bool = False  # the factor is over the only other worker

    def sentence(self) -> str:
        how = "at least " if self.is_bound else ""
        where = f", in {self.part}" if self.part else ""
        beside = "the other worker" if self.of_two else "the middle worker"
        advice = []
        if self.gain_removed is not None:
            advice.append(f"removing it {_gain(self.gain_removed)}, with one machine less")
        if self.gain_less_work is not None:
            advice.append(f"giving it {percent(1 / self.factor)} of the work {_gain(self.gain_less_work)}")
        text = f"worker {self.worker} is always slow ({how}{number(self.factor)}× {beside}{where})"
        return f"{text}: a backup does not cure that; {', and '.join(advice)}" if advice else text


def _gain(gain: float) -> str:
    if abs(gain) < 0.005:
        return "costs nothing"
    return f"gains {percent(gain)}" if gain > 0 else f"costs {percent(-gain)}"


def find_slow(world: World, best_time: Callable[[World, Floats], float]) -> list[SlowWorker]:
    """Workers that are always slow, the slowest first.

    `best_time(world, shares)` returns the time to the target of the best split; `shares` are batch sizes relative to
    the usual one.
    """
    ratios = _ratios(world.seconds)
    found: list[SlowWorker] = []
    columns = [
        column
        for column in range(world.machines)
        if _is_always_slow(ratios[:, column]) or world.workers[column] in world.unseen
    ]
    if not columns or 2 * len(columns) >= max(world.machines, 3):
        return []
    ones = np.ones(world.machines)
    now = best_time(world, ones)
    factors = np.median(ratios, axis=0)
    columns.sort(key=lambda column: -float(factors[column]))
    for column in columns:
        worker, factor = world.workers[column], float(factors[column])
        gain_removed = gain_less_work = None
        if len(found) < _MOST_GAINS:
            rest = [other for other in range(world.machines) if other != column]
            if len(rest) > 1:
                gain_removed = now / best_time(world.with_columns(rest), ones[rest]) - 1.0
            seconds, shares = world.seconds.copy(), ones.copy()
            seconds[:, column] /= factor
            shares[column] = 1.0 / factor
            gain_less_work = now / best_time(replace(world, seconds=seconds), shares) - 1.0
        found.append(
            SlowWorker(
                worker=worker,
                factor=factor,
                part=(world.slowest_part or {}).get(worker),
                is_bound=worker in world.unseen,
                gain_removed=gain_removed,
                gain_less_work=gain_less_work,
                of_two=world.machines == 2,
            )
        )
    return found


def _ratios(seconds: Floats) -> Floats:
    """Times relative to the median of their round (the shorter of two): slowness that all workers share cancels."""
    middle = np.median if seconds.shape[1] > 2 else np.min
    return np.asarray(seconds / middle(seconds, axis=1, keepdims=True), dtype=np.float64)


def _is_always_slow(ratios: Floats) -> bool:
    blocks = np.array([np.median(block) for block in np.array_split(ratios, min(_BLOCKS, len(ratios)))])
    return bool((blocks >= _AT_LEAST).mean() >= _ALWAYS and (ratios > 1.0).mean() >= _ALWAYS)
