"""Seconds a round of each split of quorum and backups, from simulated rounds without gradients.

A gradient takes as long whatever it contains, so the times need no training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import quorate
from experiments.common.trials import Found
from experiments.inception.settings import LATENCY, Length


@dataclass(frozen=True)
class Split:
    """Rounds of a quorum with backups."""

    quorum: int
    backups: int
    seed: int
    rounds: int


class Seconds(NamedTuple):
    """Mean of the rounds."""

    seconds: float


def splits(found: Found[Split, Seconds], length: Length) -> Iterable[Split]:
    """Every quorum with every number of backups."""
    for quorum in length.grid:
        for backups in length.grid_backups:
            yield from (Split(quorum, backups, seed, length.timed_rounds) for seed in length.timed_seeds)


def seconds_a_round(split: Split) -> list[Seconds]:
    policy = quorate.BackupSync(split.quorum, split.backups)
    engine = quorate.Simulated(split.quorum + split.backups, LATENCY)
    metrics = quorate.train(None, policy, engine, updates=split.rounds, seed=split.seed).metrics
    return [Seconds(metrics.seconds / metrics.updates)]
