"""The noisy bowl and races to a target, which several experiments are made of."""

from __future__ import annotations

import math

import pytest
import torch
from experiments.common.bowl import TARGET, Bowl, curvatures, expected_updates, noise_of
from experiments.common.to_target import (
    TUNING_SEED,
    Finish,
    Goal,
    chosen_in_tuning,
    cluster,
    finals,
    goodness,
    race,
    tuned_races,
)

import quorate

GOAL = Goal("excess", TARGET, rising=False)


def finish(lr: float = 0.1, seed: int = 1, seconds: float = 10.0, measure: float = 0.9, diverged: int = 0) -> Finish:
    return Finish(lr, seed, seconds, 5.0, 5.0, measure, 0.0, 0.0, diverged)


def test_the_gradient_is_that_of_the_bowl_plus_the_sample() -> None:
    task = Bowl(0.1, noise=4.0)
    model = task.model()
    (sample,) = task.train_data()[:1]
    task.loss(model, [sample]).backward()  # type: ignore[no-untyped-call]
    theta = next(model.parameters())
    slopes = torch.tensor(curvatures()).repeat_interleave(theta.numel() // len(curvatures()))
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, slopes * theta.detach() + 2.0 * sample[0])


def test_it_starts_at_one_and_every_direction_has_its_part() -> None:
    assert Bowl(0.1, 0.0).evaluate(Bowl(0.1, 0.0).model())["excess"] == pytest.approx(1.0)


def test_noise_doubles_the_updates_at_the_number_it_is_named_after() -> None:
    assert expected_updates(16, noise_of(16.0)) == pytest.approx(2 * expected_updates(1, 0.0), rel=1e-3)


def test_more_gradients_never_need_more_updates() -> None:
    noise = noise_of(16.0)
    counts = [expected_updates(gradients, noise) for gradients in (1, 4, 16, 64, 256)]
    assert counts == sorted(counts, reverse=True)


def test_a_run_needs_the_updates_that_theory_says() -> None:
    """At the best of some rates, half as many gradients more than are needed would be seen."""
    noise = noise_of(16.0)
    policy = quorate.BackupSync(16, 2)
    found = min(
        race(Bowl(lr, noise), policy, cluster(18, "chen2016", policy), GOAL, lr, updates=400, evaluate_every=1).updates
        for lr in (0.6, 0.8, 1.0, 1.2)
    )
    assert found == pytest.approx(expected_updates(16, noise), rel=0.1)


def test_a_race_that_never_gets_there_says_how_far_it_came() -> None:
    policy = quorate.Async()
    found = race(Bowl(1e-4, 0.0), policy, cluster(2, "constant:1", policy), GOAL, 1e-4, updates=20, evaluate_every=5)
    assert math.isinf(found.seconds) and 0.9 < found.measure < 1.0 and not found.diverged
    assert found.staleness == pytest.approx(1.0, abs=0.1)


def test_a_measure_can_be_the_mean_over_the_last_part_of_a_run() -> None:
    policy = quorate.FullSync()

    def measured(last_share: float) -> float:
        engine = cluster(2, "constant:1", policy)
        return race(
            Bowl(0.1, 0.0), policy, engine, GOAL, 0.1, last_share=last_share, updates=10, evaluate_every=1
        ).measure

    assert measured(0.0) < measured(0.5) < measured(1.0) < 1.0


def test_a_race_that_diverges_is_the_worst_of_all() -> None:
    policy = quorate.FullSync()
    found = race(Bowl(1e12, 0.0), policy, cluster(2, "constant:1", policy), GOAL, 1e12, updates=60, evaluate_every=5)
    assert found.diverged or math.isnan(found.measure)
    assert goodness(found, rising=False) == -math.inf < goodness(finish(seconds=math.inf, measure=5.0), rising=False)


def test_sooner_is_better_than_later_and_later_than_never() -> None:
    order = [finish(seconds=3.0), finish(seconds=9.0), finish(seconds=math.inf), finish(seconds=math.inf, measure=0.2)]
    assert sorted(order, key=goodness, reverse=True) == order


def test_a_rate_is_chosen_with_one_seed_and_run_with_the_others() -> None:
    def run(lr: float, seed: int) -> Finish:
        return finish(lr, seed, seconds=1 + abs(math.log(lr / 0.3)) + 0.1 * seed)

    rows = tuned_races(run, (0.05, 0.1, 0.2), (1, 2, 3), most=6, finer=True)
    tried = [row.lr for row in rows if row.seed == TUNING_SEED]
    assert tried == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 0.2828, 0.5657], rel=1e-3)
    assert [(row.lr, row.seed) for row in finals(rows)] == [(0.2828, 1), (0.2828, 2), (0.2828, 3)]
    assert chosen_in_tuning(rows).lr == 0.2828


def test_what_a_rate_is_worth_may_be_something_else_than_being_soon() -> None:
    rows = tuned_races(
        lambda lr, seed: finish(lr, seed, seconds=lr, measure=lr),
        (0.1, 0.2, 0.4),
        (1,),
        most=3,
        worth=lambda one: one.lr,
    )
    assert finals(rows)[0].lr == 0.4
