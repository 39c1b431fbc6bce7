"""Seconds per update of every split of the machines into a quorum and backups."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np

from quorate.planning._finishing import let_finish
from quorate.planning.world import FINISH, Floats, World

_BLOCKS = 20
_T_95 = {4: 2.78, 9: 2.26, 19: 2.09}  # Student's t for 95 %, by degrees of freedom
_EPOCH_ROUNDS = 200
_MOST_ROWS, _FEWEST_ROWS, _MOST_CELLS = 400, 60, 60_000  # enough for the short rounds at the end of an epoch


@dataclass(frozen=True, kw_only=True)
class SplitTimes:
    """One entry a quorum, N = 1 first: seconds per update, and what an update is made of."""

    mean: Floats
    low: Floats  # of the 95 % interval of the mean
    high: Floats
    median: Floats
    p99: Floats
    wasted: Floats  # share of the workers' computing that is thrown away
    gradients: Floats  # per update; less than the quorum where epochs end in short rounds
    transfers: Floats  # versions and gradients sent per update


def split_times(world: World, late: str, roughly: bool = False) -> SplitTimes:
    """The time until the N-th arrival for every N, from the joint arrivals of each round.

    `roughly`: played for fewer rounds, where worlds are only held beside each other.
    """
    times = let_finish(world, roughly) if late == FINISH else None
    if times is None:
        return _cancelled(world)
    # Rounds are played more often than they were measured, which makes nothing surer.
    low, high = _interval(times.updates[: world.rounds], times.updates.mean(axis=0))
    median, p99 = np.quantile(times.updates, (0.5, 0.99), axis=0)
    scale, gradients = _epoch_ends(world)
    scale[:-1] = 1.0  # with stragglers that are still busy, how long a short round takes is not known; it is few rounds
    return SplitTimes(
        mean=times.updates.mean(axis=0) * scale,
        low=low * scale,
        high=high * scale,
        median=median,
        p99=p99,
        wasted=times.wasted,
        gradients=gradients,
        transfers=times.transfers,
    )


def _cancelled(world: World) -> SplitTimes:
    """Late work is cancelled: every round starts afresh, so rounds can be read off the table."""
    quorums = np.arange(1.0, world.machines + 1)
    arrivals = np.sort(world.seconds, axis=1)
    ordered = arrivals + world.overhead_s
    by_regime = np.array([ordered[regime].mean(axis=0) for regime in world.regimes])
    lasted = np.array([world.span_s[regime].sum() for regime in world.regimes])
    counts = lasted[:, None] / by_regime  # updates that each split would make in each stretch
    mean = lasted.sum() / counts.sum(axis=0)
    low, high = _interval(ordered, mean)
    median, p99 = _quantiles(ordered, world.regimes, counts)
    used, waste = np.cumsum(arrivals.mean(axis=0)), (world.machines - quorums) * arrivals.mean(axis=0)
    scale, gradients = _epoch_ends(world)
    return SplitTimes(
        mean=mean * scale,
        low=low * scale,
        high=high * scale,
        median=median,
        p99=p99,
        wasted=waste / (used + waste),
        gradients=gradients,
        transfers=world.machines + quorums,
    )


def _interval(updates: Floats, mean: Floats) -> tuple[Floats, Floats]:
    """95 % of the mean, by means of blocks: neighbouring rounds may be alike."""
    blocks = next((count for count in (_BLOCKS, 10, 5) if len(updates) >= 2 * count), 0)
    if not blocks:
        return np.zeros_like(mean), np.full_like(mean, math.inf)
    means = np.array([block.mean(axis=0) for block in np.array_split(updates, blocks)])
    half = _T_95[blocks - 1] * means.std(axis=0, ddof=1) / math.sqrt(blocks)
    return np.maximum(0.0, mean - half), mean + half


def _quantiles(ordered: Floats, regimes: tuple[slice, ...], counts: Floats) -> tuple[Floats, Floats]:
    """Median and 99 % of the updates that a split makes: rounds of a stretch weigh as often as they would occur."""
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
    """How the short rounds at the end of an epoch change the mean, and the mean gradients of an update."""
    batches, machines = world.batches_per_epoch, world.machines
    if batches is None or batches > 200 * machines:
        return np.ones(machines), np.arange(1.0, machines + 1)
    few = max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_CELLS // machines))
    rows = world.seconds[:: max(1, world.rounds // few)]
    arrivals = cache(lambda started: np.sort(rows[:, :started], axis=1).mean(axis=0))
    mean_of_rows = arrivals(machines)  # so that the sample's own error cancels
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
    """(workers that get a batch, gradients that are taken) -> how often, over some epochs.

    Batches given back go first; the new ones of a round are of one epoch, so that it may run out of them.
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
