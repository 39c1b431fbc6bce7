"""Who takes part: four policies on 16 machines, in two worlds."""

from __future__ import annotations

from dataclasses import replace

import quorate
from experiments.common.race import Control, Method, Race

#: The paper's stragglers, and a heavier tail: one ticket in twenty takes ten times as long.
LATENCIES = ("chen2016", "lognormal:1.5,0.2*pauses:0.05,10")
MACHINES = 16
FULL_SYNC = "full sync"
#: Backups among the 16 machines, where everybody has full sync's rate.
BACKUPS = (0, 1, 2, 4, 8)
CONTROL_SEEDS = (1, 2, 3, 4, 5)


def split(backups: int) -> str:
    """A method's name by its backups."""
    return f"{MACHINES - backups}+{backups}" if backups else FULL_SYNC


def shared_rate(backups: int, *, equal_updates: bool = False) -> Control:
    """With full sync's tuned rate, over the whole time or for as many updates as full sync has in it."""
    return Control(
        split(backups),
        rate_of=FULL_SYNC,
        equal_updates=equal_updates,
        seeds=CONTROL_SEEDS,
        latencies=LATENCIES,
    )


#: 14+2 at its own tuned rate, which is another.
OWN_RATE = Control("14+2", seeds=CONTROL_SEEDS, latencies=LATENCIES)

FULL = Race(
    methods=(
        Method("async", quorate.Async(), MACHINES, (1.25e-4, 2.5e-4, 5e-4, 1e-3)),
        Method("softsync 4", quorate.SoftSync(4), MACHINES, (2.5e-4, 5e-4, 1e-3, 2e-3)),
        Method(FULL_SYNC, quorate.FullSync(), MACHINES, (1e-3, 2e-3, 4e-3, 8e-3)),
        Method("14+2", quorate.BackupSync(14, 2), MACHINES, (1e-3, 2e-3, 4e-3, 8e-3)),
    ),
    latencies=LATENCIES,
    seconds=1800.0,
    tuning_seconds=600.0,
    seeds=(1, 2, 3),
    measure="test_loss",
    unit="test loss, nats per character",
    rising=False,
    reference=FULL_SYNC,
    untuned=tuple(
        Method(split(b), quorate.BackupSync(MACHINES - b, b), MACHINES, ()) for b in BACKUPS if b not in (0, 2)
    ),
    controls=(
        *(shared_rate(backups) for backups in BACKUPS),
        OWN_RATE,
        *(shared_rate(backups, equal_updates=True) for backups in BACKUPS if backups),
    ),
)
QUICK = replace(
    FULL,
    methods=tuple(replace(method, rates=method.rates[-2:]) for method in FULL.methods),
    seconds=8.0,
    tuning_seconds=4.0,
    seeds=(1, 2),
    most_rates=2,
    evaluations=4,
)
