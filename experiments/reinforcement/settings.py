"""Who takes part: four policies on 16 machines, in two worlds."""

from __future__ import annotations

from dataclasses import replace

import quorate
from experiments.common.race import Method, Race

#: The paper's stragglers, and a heavier tail: one ticket in twenty takes ten times as long.
LATENCIES = ("chen2016", "lognormal:1.5,0.2*pauses:0.05,10")
MACHINES = 16
FULL_SYNC = "full sync"
#: Episodes that a worker plays for a gradient.
EPISODES = 2

FULL = Race(
    methods=(
        Method("async", quorate.Async(), MACHINES, (0.001, 0.002, 0.004, 0.008)),
        Method("softsync 4", quorate.SoftSync(4), MACHINES, (0.004, 0.008, 0.016, 0.032)),
        Method(FULL_SYNC, quorate.FullSync(), MACHINES, (0.008, 0.016, 0.032, 0.064)),
        Method("14+2", quorate.BackupSync(14, 2), MACHINES, (0.008, 0.016, 0.032, 0.064)),
    ),
    latencies=LATENCIES,
    seconds=400.0,
    tuning_seconds=100.0,
    seeds=(1, 2, 3, 4),
    measure="return",
    unit="mean return of 100 episodes",
    rising=True,
    reference=FULL_SYNC,
    targets=(200.0, 450.0),
    last=5,
    tuned_with="the test episodes",
    together=True,
)
QUICK = replace(
    FULL,
    methods=tuple(replace(method, rates=method.rates[-2:]) for method in FULL.methods),
    seconds=6.0,
    tuning_seconds=3.0,
    seeds=(1, 2),
    most_rates=2,
    evaluations=4,
)
