"""Backups against full sync at one rate for all: the gain in time apart from the gain of another rate.

A contestant of the contest has a rate of its own, so two methods differ in their quorum and in their rate. Here every
number of backups runs at every rate of a grid, until it is at the target: between two quorums at one rate only updates
and seconds per update differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch

import quorate
from experiments.common.perceptron import Perceptron
from experiments.common.to_target import Finish, cluster, race
from experiments.contest.racing import GOAL
from experiments.contest.settings import BATCH, LATENCIES

MACHINES = 16
BACKUPS = (0, 1, 2, 4, 8)
RATES = (0.1, 0.2, 0.4, 0.8)
#: By these the best rate of a number of backups is chosen; and with others it is measured.
CHOOSING_SEEDS = tuple(range(1, 6))
SEEDS = tuple(range(6, 26))
#: No training has more; at every rate of the grid some 20 to 70 are enough.
MOST_UPDATES = 1000


@dataclass(frozen=True)
class Shared:
    """One training of a quorum of 16 machines, to the target."""

    latency: str
    backups: int
    lr: float
    seed: int


def shared_trials(quick: bool = False) -> Iterable[Shared]:
    if quick:
        return [Shared("heavy tail", *one) for one in product((0, 4), RATES[-2:], (1, 6, 7))]
    return [Shared(*one) for one in product(LATENCIES, BACKUPS, RATES, (*CHOOSING_SEEDS, *SEEDS))]


def run_shared(trial: Shared) -> list[Finish]:
    torch.set_num_threads(1)
    policy = quorate.BackupSync(MACHINES - trial.backups, trial.backups)
    engine = cluster(MACHINES, LATENCIES[trial.latency], policy)
    return [
        race(
            Perceptron(trial.lr, 0.9),
            policy,
            engine,
            GOAL,
            trial.lr,
            updates=MOST_UPDATES,
            evaluate_every=1,
            batch_size=BATCH,
            seed=trial.seed,
        )
    ]
