"""Who takes part: the five of the paper's figure, in its own latencies."""

from __future__ import annotations

from dataclasses import replace

import quorate
from experiments.common.race import Method, Race

ONE = "one worker"
#: Whose samples are drawn.
DRAWN = "15+1"
_SYNC_RATES = (1e-4, 2e-4, 4e-4, 8e-4)

FULL = Race(
    methods=(
        Method("async 16", quorate.Async(), 16, (1.25e-5, 2.5e-5, 5e-5, 1e-4), dashed=True, panel="async"),
        Method("async 8", quorate.Async(), 8, (2.5e-5, 5e-5, 1e-4, 2e-4), panel="async"),
        Method(ONE, quorate.FullSync(), 1, _SYNC_RATES),
        Method("7+1", quorate.BackupSync(7, 1), 8, _SYNC_RATES, panel="sync with a backup"),
        Method("15+1", quorate.BackupSync(15, 1), 16, _SYNC_RATES, dashed=True, panel="sync with a backup"),
    ),
    latencies=("chen2016",),
    seconds=20_000.0,
    tuning_seconds=5000.0,
    seeds=(1, 2, 3),
    measure="nll",
    unit="test NLL, bits per dimension",
    rising=False,
    reference=ONE,
    shares=(1 / 3, 1 / 4),
    halved=(("7+1", 1 / 3), (ONE, 1.0)),
    averaged_share=0.02,
)
QUICK = replace(
    FULL,
    methods=tuple(replace(method, rates=method.rates[-2:]) for method in FULL.methods),
    seconds=10.0,
    tuning_seconds=5.0,
    seeds=(1, 2),
    most_rates=2,
    evaluations=5,
)
