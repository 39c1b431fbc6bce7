"""Who takes part: the five of the paper's figure, in its own latencies."""

from __future__ import annotations

from dataclasses import replace

import quorate
from experiments.common.race import Control, Method, Race

ONE = "one worker"
FULL_8, FULL_16 = "8+0", "16+0"
#: The protocol in which the rate decays exponentially, and everybody is clipped.
SLOW = "slow decay, clipped"
#: Share of the rate that is left at the end, as in the paper (1e-4 falls to 3e-6).
LEFT = 0.03
#: Ten times the median norm of one worker's gradients, which is some 40 in its first 1,500 updates at a rate of 2e-4.
#: The largest of these is 122: only explosions are clipped.
CLIP_NORM = 400.0
_SYNC_RATES = (1e-4, 2e-4, 4e-4, 8e-4)


def _slow(names: tuple[str, ...], share: float = 1.0) -> tuple[Control, ...]:
    """Methods at the tuned rate and at half of it; full sync takes the rate of the split on as many machines."""
    return tuple(
        Control(name, times, {FULL_8: "7+1", FULL_16: "15+1"}.get(name, ""), SLOW, share)
        for times in (1.0, 0.5)
        for name in names
    )


FULL = Race(
    methods=(
        Method("async 16", quorate.Async(), 16, (1.25e-5, 2.5e-5, 5e-5, 1e-4), dashed=True, panel="async"),
        Method("async 8", quorate.Async(), 8, (2.5e-5, 5e-5, 1e-4, 2e-4), panel="async"),
        Method(ONE, quorate.FullSync(), 1, _SYNC_RATES),
        Method("7+1", quorate.BackupSync(7, 1), 8, _SYNC_RATES, panel="sync"),
        Method("15+1", quorate.BackupSync(15, 1), 16, _SYNC_RATES, dashed=True, panel="sync"),
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
    own_protocol="one step, not clipped",
    untuned=(
        Method(FULL_8, quorate.FullSync(), 8, (), panel="sync"),
        Method(FULL_16, quorate.FullSync(), 16, (), dashed=True, panel="sync"),
    ),
    # In this order by value: the asynchronous ones are 98,000 and 196,000 updates each.
    controls=(
        *_slow((ONE, "7+1", "15+1", FULL_8, FULL_16)),
        *_slow(("7+1", "15+1"), 1 / 4),
        *_slow(("async 8",)),
        *_slow(("async 16",)),
    ),
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
