"""Small worlds for tests of the planner."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

import quorate
from quorate.planning.censoring import find_regimes
from quorate.planning.world import Floats, World

WORLDS = {
    "exponential": "shifted-exp:0.05,0.025",
    "heavy pauses": "pause:0.05,0.05,10",
    "one always slow": "shifted-exp:0.05,0.01*slow:3=4",
    "spells": "shifted-exp:0.05,0.01*spells:10,2,3,0.5",
    "lognormal": "lognormal:0.05,0.6",
}


def world(seconds: Floats, **rest: object) -> World:
    """Rounds as given; each takes as long as its slowest."""
    return World(
        source="a test",
        seconds=seconds,
        span_s=seconds.max(axis=1),
        regimes=find_regimes(seconds),
        workers=tuple(range(seconds.shape[1])),
        **rest,  # type: ignore[arg-type]
    )


def exponential(rounds: int, workers: int, shift: float = 1.0, mean: float = 0.5, seed: int = 0) -> Floats:
    return shift + np.random.default_rng(seed).exponential(mean, (rounds, workers))


def record(
    out: Path,
    latency: str,
    quorum: int,
    backups: int,
    updates: int,
    *,
    late: str = "cancel",
    samples: int | None = None,
) -> Path:
    """A simulated run without gradients."""
    policy = quorate.BackupSync(quorum, backups, late=late)
    engine = quorate.Simulated(quorum + backups, latency)
    quorate.train(None, policy, engine, updates=updates, out=out, samples=samples, patience_s=math.inf)
    return out


def measured(
    latency: str, quorum: int, backups: int, updates: int, *, late: str = "cancel", samples: int | None = None
) -> float:
    """Mean seconds of an update when the split is really run."""
    policy = quorate.BackupSync(quorum, backups, late=late)
    engine = quorate.Simulated(quorum + backups, latency)
    result = quorate.train(None, policy, engine, updates=updates, samples=samples, patience_s=math.inf)
    mean = result.metrics.update_seconds.mean
    assert mean is not None
    return mean
