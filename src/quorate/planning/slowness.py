"""Workers that are always slow, told apart from those that are slow by chance.

A backup hides whoever happens to be slow; it cannot make a machine faster. One that is always slow is always the one
that is dropped: it computes for nothing, and takes the place of a backup that could cover for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quorate.planning.world import Floats, World

_AT_LEAST = 1.2  # times the middle worker; less is not worth a word
_BLOCKS = 8  # stretches of the run; it must be slow in nearly all of them
_ALWAYS = 0.85
_MOST_GAINS = 5  # of the slowest the gain is worked out; each takes two plans


@dataclass(frozen=True, kw_only=True)
class SlowWorker:
    """One that is always slow, and what could be done about it."""

    worker: int
    factor: float  # times the middle worker
    part: str | None  # data, compute or transfer, where that was measured
    is_bound: bool  # it hardly ever finished: it is at least so slow
    gain_removed: float | None  # relative gain in time to the target, over the best split with it
    gain_less_work: float | None  # the same when it gets as much less work as it is slower

    def sentence(self) -> str:
        how = "at least " if self.is_bound else ""
        where = f", in {self.part}" if self.part else ""
        advice = []
        if self.gain_removed is not None:
            advice.append(f"removing it {_gain(self.gain_removed)}, with one machine less")
        if self.gain_less_work is not None:
            advice.append(f"giving it {1 / self.factor:.0%} of the work {_gain(self.gain_less_work)}")
        text = f"worker {self.worker} is always slow ({how}{self.factor:.2g}× the middle worker{where})"
        return f"{text}: a backup does not cure that; {', and '.join(advice)}" if advice else text


def _gain(gain: float) -> str:
    if abs(gain) < 0.005:
        return "costs nothing"
    return f"gains {gain:.1%}" if gain > 0 else f"costs {-gain:.1%}"


def find_slow(world: World, best_time: Callable[[World, Floats], float]) -> list[SlowWorker]:
    """Who is always slow; `best_time(world, shares)` is the time to the target of the best split.

    `shares` is how large each worker's batch is, 1 for the usual.
    """
    ratios = _ratios(world.seconds)
    found: list[SlowWorker] = []
    columns = [
        column
        for column in range(world.machines)
        if _is_always_slow(ratios[:, column]) or world.workers[column] in world.unseen
    ]
    if not columns or len(columns) >= world.machines / 2:
        return []
    ones = np.ones(world.machines)
    now = best_time(world, ones)
    factors = np.median(ratios, axis=0)
    columns.sort(key=lambda column: -float(factors[column]))
    for column in columns:
        factor = float(factors[column])
        if len(found) >= _MOST_GAINS:
            found.append(_slow(world, column, factor, None, None))
            continue
        rest = [other for other in range(world.machines) if other != column]
        removed = best_time(world.with_columns(rest), ones[rest]) if len(rest) > 1 else None
        seconds, shares = world.seconds.copy(), ones.copy()
        seconds[:, column] /= factor
        shares[column] = 1.0 / factor
        less = best_time(replace(world, seconds=seconds), shares)
        gain_removed = None if removed is None else now / removed - 1.0
        found.append(_slow(world, column, factor, gain_removed, now / less - 1.0))
    return found


def _slow(
    world: World, column: int, factor: float, gain_removed: float | None, gain_less_work: float | None
) -> SlowWorker:
    worker = world.workers[column]
    return SlowWorker(
        worker=worker,
        factor=factor,
        part=(world.slowest_part or {}).get(worker),
        is_bound=worker in world.unseen,
        gain_removed=gain_removed,
        gain_less_work=gain_less_work,
    )


def _ratios(seconds: Floats) -> Floats:
    """Each time beside the middle one of its round: what all share in a round cancels."""
    return np.asarray(seconds / np.median(seconds, axis=1, keepdims=True), dtype=np.float64)


def _is_always_slow(ratios: Floats) -> bool:
    blocks = np.array([np.median(block) for block in np.array_split(ratios, min(_BLOCKS, len(ratios)))])
    return bool((blocks >= _AT_LEAST).mean() >= _ALWAYS and (ratios > 1.0).mean() >= _ALWAYS)
