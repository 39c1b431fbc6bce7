"""The trials: quorum and backups, by how slow workers are and how bytes travel; all in virtual time, no gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import quorate
from experiments.communication.layouts import ALL_REDUCE, FREE, LAYOUTS, MODEL_BYTES, ring_bytes, ring_seconds

MEASURED = "measured (chen2016)"
#: Kinds of slowness, with steps of about 1.6 s.
WORLDS = {
    MEASURED: "chen2016",
    "no tail": "constant:1.6",
    "exponential, mild": "shifted-exp:1.45,0.15",
    "lognormal, s = 0.2": "lognormal:1.57,0.2",
    "Pareto, α = 4": "pareto:1.2,4",
    "rare pauses, 1 % × 4": "lognormal:1.55,0.05*pauses:0.01,4",
    "one always slow, × 2": "lognormal:1.6,0.05*slow:0=2",
    "all slow together": "lognormal:1.6,0.05*spells:300,30,4",
}
#: The quorum; with backups at most the 100 workers that were measured.
QUORUM = 80


@dataclass(frozen=True)
class Split:
    """One run: quorum + backups machines."""

    world: str
    layout: str
    late: str  # what becomes of late work: "cancel" or "finish"
    quorum: int
    backups: int
    updates: int
    seed: int


class Cost(NamedTuple):
    """What an update took, on average."""

    seconds: float
    bytes_sent: float  # versions to workers and gradients from them, or what an all-reduce moves
    bytes_wasted: float  # of those, what made no version
    busy_s: float  # worker seconds on tickets, transfers included
    wasted_s: float  # of those, on tickets that made no version
    idle_s: float  # worker seconds of waiting for the next version


@dataclass(frozen=True)
class Setting:
    """How much is run."""

    updates: int = 200
    seeds: int = 5
    measured_seeds: int = 10  # of the measured world, whose tail is the heaviest
    quorum: int = QUORUM
    backups: tuple[int, ...] = (0, 2, 4, 8, 16)
    five_percent: int = 4
    worlds: tuple[str, ...] = tuple(WORLDS)


QUICK = Setting(
    updates=10, seeds=2, measured_seeds=2, quorum=20, backups=(0, 1, 2), five_percent=1, worlds=(MEASURED, "no tail")
)


def wanted(setting: Setting) -> Iterator[Split]:
    """b from 0 to a quarter in the measured world; then 5 % more machines in every world, in two roles."""
    few = setting.five_percent
    found = [
        Split(MEASURED, layout, late, setting.quorum, backups, setting.updates, seed)
        for seed in range(1, setting.measured_seeds + 1)
        for layout in LAYOUTS
        for late in (("cancel",) if layout == ALL_REDUCE else ("cancel", "finish"))
        for backups in setting.backups
    ]
    roles = [(0, 0), (0, few), (few, 0)]  # more workers in the quorum, more backups
    found += [
        Split(world, layout, "cancel", setting.quorum + more, backups, setting.updates, seed)
        for world in setting.worlds
        for seed in range(1, (setting.measured_seeds if world == MEASURED else setting.seeds) + 1)
        for layout in LAYOUTS
        for more, backups in roles
    ]
    yield from dict.fromkeys(found)


def run_split(trial: Split) -> list[Cost]:
    """Simulate; an all-reduce is simulated without a network, and its bytes and seconds come from the formula."""
    if trial.layout != ALL_REDUCE:
        return [_simulated(trial)]
    cost = _simulated(replace(trial, layout=FREE))
    machines = trial.quorum + trial.backups
    ring = ring_seconds(machines)
    # Everybody takes part, whoever is late with nothing to give: b of the n turns carry nothing.
    sent, useful = ring_bytes(machines), ring_bytes(trial.quorum)
    return [
        cost._replace(
            seconds=cost.seconds + ring,
            bytes_sent=sent,
            bytes_wasted=sent - useful,
            idle_s=cost.idle_s + ring * machines,
        )
    ]


@cache
def _simulated(trial: Split) -> Cost:
    """Kept, since an all-reduce asks for what the free network has just shown."""
    engine = quorate.Simulated(
        trial.quorum + trial.backups,
        WORLDS[trial.world],
        network=LAYOUTS[trial.layout].network(),
        model_bytes=MODEL_BYTES,
    )
    policy = quorate.BackupSync(trial.quorum, trial.backups, late=trial.late)
    metrics = quorate.train(None, policy, engine, updates=trial.updates, seed=trial.seed).metrics
    work = metrics.workers.values()
    updates = metrics.updates
    return Cost(
        metrics.seconds / updates,
        metrics.bytes_sent / updates,
        (metrics.bytes_sent - metrics.bytes_used) / updates,
        sum(one.compute_s for one in work) / updates,
        sum(one.wasted_s for one in work) / updates,
        sum(one.idle_s for one in work) / updates,
    )
