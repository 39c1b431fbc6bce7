"""One contestant on one cluster, on the library's public interface."""

from __future__ import annotations

import torch

from experiments.common.perceptron import Perceptron
from experiments.common.to_target import Finish, Goal, cluster, race, tuned_races
from experiments.contest.settings import (
    BATCH,
    BUDGET_S,
    BY_NAME,
    LATENCIES,
    MOST_RATES,
    SEEDS,
    TARGET,
    Trial,
    first_rates,
)

GOAL = Goal("accuracy", TARGET)
QUICK_BUDGET_S = 6.0


def run(trial: Trial, quick: bool = False) -> list[Finish]:
    """Tune the rate, then race with every seed; every training uses its whole time, also after the goal."""
    torch.set_num_threads(1)
    method = BY_NAME[trial.method]
    policy = method.policy(trial.machines)
    per_update = policy.begin(trial.machines).per_update

    def one(lr: float, seed: int) -> Finish:
        # The adaptive policy wants the norm of single gradients often, which a round as one batch does not have.
        engine = cluster(trial.machines, LATENCIES[trial.latency], policy, together=method.family != "adaptive")
        return race(
            Perceptron(lr, method.momentum),
            policy,
            engine,
            GOAL,
            lr,
            last_share=0.5,
            until=f"seconds>={QUICK_BUDGET_S if quick else BUDGET_S}",
            evaluate_every=max(1, trial.machines // per_update),
            batch_size=BATCH,
            **method.learning,
            seed=seed,
        )

    rates = first_rates(method, trial.machines)
    # By what was learned in all, not by who was first at the target: rates that are too high get there, but by luck.
    return tuned_races(
        one, rates[-2:] if quick else rates, SEEDS, most=2 if quick else MOST_RATES, worth=lambda finish: finish.measure
    )
