"""One quorum to the target, and one cluster's arrivals, on the library's public interface."""

from __future__ import annotations

from typing import NamedTuple

import torch

import quorate
from experiments.common.bowl import TARGET, Bowl, expected_updates, noise_of
from experiments.common.perceptron import Perceptron
from experiments.common.to_target import TUNING_SEED, Finish, Goal, cluster, race, tuned_races
from experiments.rate.settings import (
    DIGITS_RATES,
    FIRST_RATES,
    LATENCY,
    MOST_RATES,
    SEEDS,
    Timed,
    Trial,
)

BOWL_GOAL = Goal("excess", TARGET, rising=False)
#: A loss falls more smoothly than an accuracy rises, so updates to it are less a matter of luck.
DIGITS_GOAL = Goal("test_loss", 0.2, rising=False)
DIGITS_BATCH = 4
#: A training ends at the latest after so many times the updates that theory wants.
PATIENCE = 4
_DIGITS_UPDATES = 3200


class Run(NamedTuple):
    """A race, with the backups that it had."""

    backups: int
    lr: float
    seed: int
    seconds: float
    updates: float
    samples: float
    measure: float
    diverged: int


class Arrival(NamedTuple):
    """Mean seconds from a version to its k-th arrival."""

    k: int
    mean_s: float


def run(trial: Trial, quick: bool = False) -> list[Run]:
    """Tune the rate without backups; then every number of them with every seed."""
    torch.set_num_threads(1)
    backups, *more = trial.numbers_of_backups
    is_bowl = trial.task == "bowl"
    first = FIRST_RATES if is_bowl else tuple(rate * min(1.0, trial.quorum / 4) for rate in DIGITS_RATES)
    found = tuned_races(
        lambda lr, seed: _one(trial, backups, lr, seed),
        first[-2:] if quick else first,
        SEEDS[trial.task],
        most=2 if quick else MOST_RATES,
        rising=False,
        finer=not quick,
    )
    chosen = found[-1].lr
    runs = [_run(backups, finish) for finish in found]
    return runs + [_run(number, _one(trial, number, chosen, seed)) for number in more for seed in SEEDS[trial.task]]


def _one(trial: Trial, backups: int, lr: float, seed: int) -> Finish:
    policy = quorate.BackupSync(trial.quorum, backups)
    engine = cluster(trial.quorum + backups, LATENCY, policy)
    if trial.task == "bowl":
        noise = noise_of(trial.noise)
        updates = round(PATIENCE * expected_updates(trial.quorum, noise))
        return race(
            Bowl(lr, noise),
            policy,
            engine,
            BOWL_GOAL,
            lr,
            updates=updates,
            evaluate_every=max(1, updates // 400),
            seed=seed,
        )
    return race(
        Perceptron(lr, momentum=0.0),
        policy,
        engine,
        DIGITS_GOAL,
        lr,
        updates=_DIGITS_UPDATES // min(8, trial.quorum),
        evaluate_every=max(1, 16 // trial.quorum),
        batch_size=DIGITS_BATCH,
        seed=seed,
    )


def _run(backups: int, finish: Finish) -> Run:
    one = finish
    return Run(backups, one.lr, one.seed, one.seconds, one.updates, one.samples, one.measure, one.diverged)


def timed(trial: Timed) -> list[Arrival]:
    """Full sync without gradients waits for everybody, and so sees every k."""
    engine = quorate.Simulated(trial.workers, trial.latency)
    done = quorate.train(None, quorate.FullSync(), engine, updates=trial.rounds, seed=TUNING_SEED)
    return [Arrival(k, mean_s) for k, mean_s in enumerate(done.metrics.kth_arrival_means(), start=1)]
