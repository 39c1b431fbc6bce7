"""One method in one cell, on the library's public interface."""

from __future__ import annotations

import math

import torch

import quorate
from experiments.common.bowl import TARGET, Bowl, expected_updates, noise_of
from experiments.common.perceptron import Perceptron
from experiments.common.to_target import Finish, Goal, cluster, race, tuned_races
from experiments.frontier.settings import FIRST_SHARES, MOST_RATES, SEEDS, WORKERS, Trial, latency_text

BOWL_GOAL = Goal("excess", TARGET, rising=False)
DIGITS_GOAL = Goal("accuracy", 0.95)
DIGITS_BATCH = 8
#: A training ends at the latest after so many times the gradients that theory wants of full sync.
PATIENCE = 4
_DIGITS_GRADIENTS = 6400
#: On digits plain SGD bears about this much with fresh gradients.
_DIGITS_LIMIT = 1.0


def policy_of(trial: Trial) -> quorate.Policy:
    """The policy of a family and its option."""
    if trial.family == "full-sync":
        return quorate.FullSync()
    if trial.family == "backup":
        return quorate.BackupSync(WORKERS - trial.option, trial.option)
    if trial.family == "softsync":
        return quorate.SoftSync(trial.option)
    return quorate.Async()


def rate_limit(trial: Trial) -> float:
    """The highest stable rate at the mean staleness, for the curvature 1: (9) and (18) of docs/theory.md."""
    staleness = 0.0
    if trial.family in ("softsync", "async"):
        staleness = (WORKERS - 1) / trial.option
    limit = 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    return limit if trial.task == "bowl" else limit * _DIGITS_LIMIT / 2


def run(trial: Trial, quick: bool = False) -> list[Finish]:
    """Tune the rate, then race with every seed."""
    torch.set_num_threads(1)

    def one(lr: float, seed: int) -> Finish:
        policy = policy_of(trial)
        engine = cluster(WORKERS, latency_text(trial.tail, trial.spread), policy)
        per_update = policy.begin(WORKERS).per_update
        if trial.task == "bowl":
            noise = noise_of(trial.noise)
            gradients = PATIENCE * WORKERS * expected_updates(WORKERS, noise)
            updates, every = round(gradients / per_update), max(1, WORKERS // (2 * per_update))
            return race(
                Bowl(lr, noise), policy, engine, BOWL_GOAL, lr, updates=updates, evaluate_every=every, seed=seed
            )
        return race(
            Perceptron(lr, momentum=0.0),
            policy,
            engine,
            DIGITS_GOAL,
            lr,
            updates=_DIGITS_GRADIENTS // per_update,
            evaluate_every=max(1, WORKERS // per_update),
            batch_size=DIGITS_BATCH,
            seed=seed,
        )

    limit = rate_limit(trial)
    return tuned_races(
        one,
        [limit * share for share in (FIRST_SHARES[-2:] if quick else FIRST_SHARES)],
        SEEDS,
        most=2 if quick else MOST_RATES,
        rising=trial.task != "bowl",
        finer=trial.task == "bowl" and not quick,
    )
