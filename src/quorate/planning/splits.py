"""Seconds per update for each split N+b of the machines.

If late work is cancelled, the times follow from the table of rounds, or from a formula for some latency models. If
late work finishes, no formula is exact, so the rounds are simulated one after the other, for all splits at once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quorate.errors import BadInput
from quorate.latency import Latency, Pareto, order_statistic_mean
from quorate.latency.laws import ShiftedExponential
from quorate.planning.world import FINISH, Floats, World

_MOST_INTEGRALS = 200  # integrals to compute; with more machines, the drawn rounds are as accurate


def exact_means(latency: Latency, machines: int) -> Floats | None:
    """E[X_(N:n)] for N = 1 … n; inf if the mean is infinite; None if there is no formula."""
    if machines > _MOST_INTEGRALS and not isinstance(latency, Pareto | ShiftedExponential):
        return None
    try:
        return np.array([order_statistic_mean(latency, machines, quorum) for quorum in range(1, machines + 1)])
    except BadInput:
        return None


def finite_from(latency: Latency) -> int | None:
    """The fewest backups with which the mean of an update is finite; None if it always is.

    The N-th of n times with a Pareto tail has a mean iff α > 1/(b+1).
    """
    tails = [law.alpha for law in _inside(latency) if isinstance(law, Pareto) and law.alpha <= 1.0]
    return math.floor(1.0 / min(tails)) if tails else None


def _inside(latency: Latency) -> list[Latency]:
    """The latency model and its component models."""
    found = [latency]
    for value in vars(latency).values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, Latency):
                found += _inside(part)
    return found


_MOST_SIMULATED = 40_000_000  # rounds × splits × machines: a second or two
_MOST_ROUNDS, _FEWEST_ROUNDS = 6_000, 60
_ROUGHLY = 8


class Finished(NamedTuple):
    updates: Floats  # (rounds, splits): seconds of each update
    wasted: Floats  # (splits,)
    transfers: Floats  # (splits,)


def let_finish(world: World, roughly: bool = False) -> Finished:
    """Simulate rounds in which a late worker first finishes its ticket, and then joins the open round."""
    machines = world.machines
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, _MOST_SIMULATED // machines**2) // (_ROUGHLY if roughly else 1))
    warm_up = rounds // 10  # until the stragglers are in steady state
    splits = np.arange(machines)  # also the index of the N-th arrival of each split
    now = np.zeros(machines)  # by split
    free = np.zeros((machines, machines))  # (split, worker): when the worker finishes its ticket
    updates = np.empty((rounds, machines))
    useful, wasted, sent = np.zeros(machines), np.zeros(machines), np.zeros(machines)
    pick = _RowPicker(world)
    for row in range(-warm_up, rounds):
        needs = pick.rows(now, row + warm_up)
        begins = np.maximum(now[:, None], free)
        arrives = begins + needs
        closes = np.sort(arrives, axis=1)[splits, splits]
        starts = begins < closes[:, None]  # the other workers finished older tickets throughout the round
        late = starts & (arrives > closes[:, None])
        opens = closes + world.overhead_s
        if row >= 0:
            updates[row] = opens - now
            useful += np.where(starts & ~late, needs, 0.0).sum(axis=1)
            wasted += np.where(late, needs, 0.0).sum(axis=1)
            sent += 2.0 * starts.sum(axis=1)
        free = np.where(late, arrives, np.where(starts, opens[:, None], free))
        now = opens
    return Finished(updates, wasted / (useful + wasted), sent / rounds)


class _RowPicker:
    """Selects the recorded round of each split: the clock selects the stretch, whose rounds follow in order."""

    def __init__(self, world: World) -> None:
        self._seconds = world.seconds
        self._begins = np.array([regime.start for regime in world.regimes])
        self._lengths = np.array([regime.stop - regime.start for regime in world.regimes])
        self._until_s = np.cumsum([world.span_s[regime].sum() for regime in world.regimes])

    def rows(self, now: Floats, number: int) -> Floats:
        if len(self._begins) == 1:
            alike: Floats = self._seconds[number % len(self._seconds)][None, :]
            return alike
        stretch = np.searchsorted(self._until_s, now % self._until_s[-1], side="right")
        stretch = np.minimum(stretch, len(self._begins) - 1)
        rows: Floats = self._seconds[self._begins[stretch] + number % self._lengths[stretch]]
        return rows


_BLOCKS = 20
_T_95 = {4: 2.78, 9: 2.26, 19: 2.09}  # Student's t for 95 %, by degrees of freedom
_EPOCH_ROUNDS = 200
_MOST_ROWS, _FEWEST_ROWS, _MOST_CELLS = 400, 60, 60_000  # sample for the short rounds at the end of an epoch


@dataclass(frozen=True, kw_only=True)
class SplitTimes:
    """Seconds per update and its other costs: one entry per quorum, N = 1 first."""

    mean: Floats
    low: Floats  # of the 95 % interval of the mean
    high: Floats
    median: Floats
    p99: Floats
    wasted: Floats  # share of the workers' computing whose gradients are dropped
    gradients: Floats  # per update; below the quorum if epochs end in short rounds
    transfers: Floats  # versions and gradients sent per update
    blocks: Floats | None = None  # (blocks of rounds, splits): block means, for intervals; None: means are exact

    def unsure(self, place: int, other: int) -> float:
        """Half the 95 % interval of the ratio of two splits' means, relative to the ratio; paired by round."""
        if self.blocks is None or place == other:
            return 0.0
        if not len(self.blocks):
            return math.inf
        ratios = np.log(self.blocks[:, place] / self.blocks[:, other])
        return math.expm1(_half(ratios))


def split_times(world: World, late: str, roughly: bool = False) -> SplitTimes:
    """The time until the N-th arrival for every N, from the joint arrivals of each round.

    `roughly`: simulate fewer rounds, for worlds that are only compared with each other.
    """
    scale, gradients = _epoch_ends(world)
    if late == FINISH:
        updates, wasted, transfers = let_finish(world, roughly)
        mean = updates.mean(axis=0)
        median, p99 = np.quantile(updates, (0.5, 0.99), axis=0)
        # More rounds are simulated than were measured; the additional ones must not narrow the interval.
        blocks = _blocks(updates[: world.rounds])
        scale[:-1] = 1.0  # while stragglers are busy, the length of a short round is unknown; such rounds are rare
    else:  # Every round starts afresh, so the arrivals can be read off the table.
        quorums = np.arange(1.0, world.machines + 1)
        arrivals = np.sort(world.seconds, axis=1)
        updates = arrivals + world.overhead_s
        by_regime = np.array([updates[regime].mean(axis=0) for regime in world.regimes])
        lasted = np.array([world.span_s[regime].sum() for regime in world.regimes])
        counts = lasted[:, None] / by_regime  # updates that each split would make in each stretch
        mean = lasted.sum() / counts.sum(axis=0)
        median, p99 = _quantiles(updates, world.regimes, counts)
        blocks = _blocks(updates)
        used, waste = np.cumsum(arrivals.mean(axis=0)), (world.machines - quorums) * arrivals.mean(axis=0)
        wasted, transfers = waste / (used + waste), world.machines + quorums
    low, high = _interval(blocks, mean)
    return SplitTimes(
        mean=mean * scale,
        low=low * scale,
        high=high * scale,
        median=median,
        p99=p99,
        wasted=wasted,
        gradients=gradients,
        transfers=transfers,
        blocks=blocks,
    )


def _blocks(updates: Floats) -> Floats:
    """Means of blocks of rounds, since neighbouring rounds may be correlated; no block if rounds are too few."""
    count = next((count for count in (_BLOCKS, 10, 5) if len(updates) >= 2 * count), 0)
    means = [block.mean(axis=0) for block in np.array_split(updates, count)] if count else []
    return np.array(means).reshape(count, updates.shape[1])


def _half(blocks: Floats) -> Any:
    """Half the 95 % interval of the mean, from block means."""
    return _T_95[len(blocks) - 1] * blocks.std(axis=0, ddof=1) / math.sqrt(len(blocks))


def _interval(blocks: Floats, mean: Floats) -> tuple[Floats, Floats]:
    """95 % interval of the mean."""
    if not len(blocks):
        return np.zeros_like(mean), np.full_like(mean, math.inf)
    half = _half(blocks)
    return np.maximum(0.0, mean - half), mean + half


def _quantiles(ordered: Floats, regimes: tuple[slice, ...], counts: Floats) -> tuple[Floats, Floats]:
    """Median and 99 % quantile of a split's updates; each round is weighted by how often its stretch would occur."""
    if len(regimes) == 1:
        median, p99 = np.quantile(ordered, (0.5, 0.99), axis=0)
        return median, p99
    lengths = np.array([regime.stop - regime.start for regime in regimes])
    weights = np.repeat(counts / lengths[:, None], lengths, axis=0)
    order = np.argsort(ordered, axis=0)
    values = np.take_along_axis(ordered, order, axis=0)
    up_to = np.cumsum(np.take_along_axis(weights, order, axis=0), axis=0)
    up_to /= up_to[-1]
    places = [(up_to < level).sum(axis=0) for level in (0.5, 0.99)]
    columns = np.arange(ordered.shape[1])
    median, p99 = (values[np.minimum(place, len(values) - 1), columns] for place in places)
    return median, p99


def _epoch_ends(world: World) -> tuple[Floats, Floats]:
    """(scale, gradients): the effect of short rounds at the end of epochs on the mean time and mean gradients."""
    batches, machines = world.batches_per_epoch, world.machines
    if batches is None or batches > 200 * machines:
        return np.ones(machines), np.arange(1.0, machines + 1)
    few = max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_CELLS // machines))
    rows = world.seconds[:: max(1, world.rounds // few)]
    arrivals = cache(lambda started: np.sort(rows[:, :started], axis=1).mean(axis=0))
    mean_of_rows = arrivals(machines)  # a ratio within the sample, so that its error cancels
    scale, gradients = np.empty(machines), np.empty(machines)
    for place, quorum in enumerate(range(1, machines + 1)):
        rounds = _rounds_of_epochs(batches, machines, quorum)
        total = sum(rounds.values())
        ratio = 0.0
        for (started, taken), count in rounds.items():
            if started == machines and taken == quorum:
                ratio += count
                continue
            waits = float(arrivals(started)[taken - 1])
            ratio += count * (waits + world.overhead_s) / (mean_of_rows[place] + world.overhead_s)
        scale[place] = ratio / total
        gradients[place] = sum(taken * count for (_, taken), count in rounds.items()) / total
    return scale, gradients


def _rounds_of_epochs(batches: int, machines: int, quorum: int) -> Counter[tuple[int, int]]:
    """(workers with a batch, gradients in the update) -> number of rounds, over some epochs.

    Returned batches are handed out first. New batches of a round come from one epoch, which may run out of them.
    """
    found: Counter[tuple[int, int]] = Counter()
    returned, fresh = 0, batches
    for _ in range(max(_EPOCH_ROUNDS, 2 * batches // quorum)):
        fresh = fresh or batches
        new = min(machines - returned, fresh)
        fresh -= new
        started = returned + new
        taken = min(quorum, started)
        returned = started - taken
        found[started, taken] += 1
    return found
