"""From arrivals to a choice: which quorum of n machines reaches a target first, seed by seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from experiments.common.spread import Spread, spread_of
from experiments.stragglers.published import POWER, iterations
from experiments.stragglers.simulated import MEAN, Arrival, Rounds
from experiments.stragglers.worlds import WORLDS

Found = dict[Rounds, list[Arrival]]
Seconds = dict[int, float]
"""Mean seconds of an update by its quorum."""


class Choice(NamedTuple):
    """The best split of a world, and what it is worth: time to the target with all n over that with the split."""

    backups: Spread
    gain: Spread


def by_seed(runs: Found, world: str, late: str) -> dict[int, Seconds]:
    """Seconds of an update by seed and quorum.

    Where late work is cancelled all workers begin each round together, so the k-th arrival of full sync is what a
    quorum of k would have waited; but not where slow periods come by the clock.
    """
    seconds: dict[int, Seconds] = {}
    for trial, rows in runs.items():
        if trial.world != world:
            continue
        is_full = trial.quorum == trial.machines
        if is_full or trial.late == late:
            tells_all = is_full and late == "cancel" and not WORLDS[world].by_the_clock
            means = {row.k: row.seconds for row in rows if row.level == MEAN}
            kept = means if tells_all else {trial.quorum: means[trial.quorum]}
            seconds.setdefault(trial.seed, {}).update(kept)
    return {seed: found for seed, found in seconds.items() if len(found) > 1}  # full sync alone is no choice


def time_to_target(seconds: Seconds) -> Seconds:
    """Time to a target by quorum, over that of the largest: updates fall as N^-0.85, as the paper found."""
    most = max(seconds)
    return {quorum: (quorum / most) ** -POWER * value / seconds[most] for quorum, value in sorted(seconds.items())}


def choice(seconds_by_seed: Mapping[int, Seconds]) -> Choice:
    """The best split of each seed."""
    backups, gains = [], []
    for seconds in seconds_by_seed.values():
        relative = time_to_target(seconds)
        best = min(relative, key=lambda quorum: relative[quorum])
        backups.append(float(max(relative) - best))
        gains.append(1 / relative[best])
    return Choice(spread_of(backups), spread_of(gains))


def estimated_hours(seconds: Seconds) -> Seconds:
    """The paper's figure 6: its updates to convergence times the mean time of an update."""
    return {quorum: iterations(quorum) * value / 3600 for quorum, value in sorted(seconds.items())}
