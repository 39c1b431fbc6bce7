"""The mean time to the k-th of n arrivals: formula, integral and simulation agree."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quorate.errors import BadInput
from quorate.latency import (
    Chen2016,
    Constant,
    Independent,
    Latency,
    Lognormal,
    Pareto,
    Pause,
    Quantiles,
    ShiftedExponential,
    order_statistic_mean,
    parse_latency,
)
from quorate.latency.order_statistics import integral_mean
from tests.latency.latency_models import independent


def simulated(model: Latency, n: int, k: int, rounds: int, seed: int) -> tuple[float, float]:
    """The mean of the k-th of n, and its standard error."""
    draw = model.sampler(seed, n)
    times = [sorted(draw(worker, row, row, 0.0) for worker in range(n))[k - 1] for row in range(rounds)]
    mean = math.fsum(times) / rounds
    return mean, math.sqrt(math.fsum((time_s - mean) ** 2 for time_s in times) / rounds**2)


@pytest.mark.parametrize(
    ("model", "n", "k", "rounds"),
    [
        (ShiftedExponential(0.05, 0.025), 1, 1, 30_000),
        (ShiftedExponential(0.05, 0.025), 10, 10, 15_000),
        (ShiftedExponential(0.05, 0.025), 10, 8, 10_000),
        (ShiftedExponential(0.0, 1.0), 100, 96, 6_000),
        (ShiftedExponential(0.05, 0.025), 100, 50, 1_000),
        (Pareto(0.05, 2.5), 10, 8, 15_000),
        (Pareto(0.05, 2.5), 100, 96, 6_000),
        (Pareto(0.05, 1.2), 20, 15, 15_000),
        # No single draw has a mean here, yet the 14th of 20 does.
        (Pareto(0.05, 0.8), 20, 14, 30_000),
        (Lognormal(0.05, 0.4), 10, 9, 10_000),
        (Quantiles(((0.05, 0), (0.06, 0.5), (0.2, 1))), 10, 9, 10_000),
        (Pause(0.05, 0.04, 3), 20, 20, 30_000),
    ],
)
def test_the_mean_of_the_kth_arrival_is_that_of_simulated_rounds(model: Latency, n: int, k: int, rounds: int) -> None:
    expected = order_statistic_mean(model, n, k)
    mean, error = simulated(model, n, k, rounds, seed=11)
    assert 3.5 * error < 0.01 * expected, "enough rounds for 1 % to mean something"
    assert mean == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("n", [1, 2, 10, 100, 1000, 10_000])
def test_the_integral_meets_the_closed_forms(n: int) -> None:
    for k in {1, -(-n // 2), max(1, n - 4), n}:
        for model in (
            ShiftedExponential(0.05, 0.025),
            *(Pareto(0.05, a) for a in (0.3, 0.7, 1.05, 1.5, 3.0, 20.0)),
        ):
            expected = order_statistic_mean(model, n, k)
            if math.isfinite(expected):
                assert integral_mean(model, n, k) == pytest.approx(expected, rel=1e-5), (model, k)


def test_the_paper_sized_case_is_the_known_number() -> None:
    # theory.md: 96 of 100 exponentials.
    assert order_statistic_mean(ShiftedExponential(0.0, 1.0), 100, 96) == pytest.approx(3.104, abs=0.001)


def test_a_jump_is_integrated_exactly() -> None:
    # The k-th of n is on time iff at least k are.
    n, k, p = 50, 47, 0.04
    on_time = math.fsum(math.comb(n, j) * (1 - p) ** j * p ** (n - j) for j in range(k, n + 1))
    expected = 0.05 * on_time + 0.5 * (1 - on_time)
    assert order_statistic_mean(Pause(0.05, p, 10), n, k) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(independent, st.integers(1, 30))
@example(Pause(1.0, 1e-45, 2.0), 1)  # 1 - p rounds to 1
def test_the_kth_times_rise_and_average_to_the_mean(model: Independent, n: int) -> None:
    mean = model.mean()
    times = [order_statistic_mean(model, n, k) for k in range(1, n + 1)]
    assert all(a <= b * (1 + 1e-6) for a, b in pairwise(times))
    if mean is not None and math.isfinite(mean):
        assert math.fsum(times) / n == pytest.approx(mean, rel=1e-5)


def test_an_infinite_mean_is_said_to_be() -> None:
    assert order_statistic_mean(Pareto(1.0, 1.0), 5, 5) == math.inf
    assert order_statistic_mean(Pareto(1.0, 0.5), 10, 9) == math.inf
    # 1/α = 2 < b+1 = 3: Γ(11) Γ(1) / (Γ(3) Γ(9)) = 90/2
    assert order_statistic_mean(Pareto(1.0, 0.5), 10, 8) == pytest.approx(45.0)


def test_a_random_subset_of_the_hundred_measured_workers() -> None:
    chen = Chen2016()
    assert order_statistic_mean(chen, 100, 96) == pytest.approx(chen.mean_time_to(96))
    assert order_statistic_mean(chen, 1, 1) == pytest.approx(chen.mean())
    mean, error = simulated(chen, 20, 18, 6000, seed=2)
    assert 3.5 * error < 0.01 * mean
    assert mean == pytest.approx(order_statistic_mean(chen, 20, 18), rel=0.01)


@pytest.mark.parametrize(("n", "k"), [(3, 0), (3, 4), (0, 0)])
def test_an_arrival_that_does_not_exist_is_refused(n: int, k: int) -> None:
    with pytest.raises(BadInput, match=f"the {k}-th of {n}"):
        order_statistic_mean(Constant(1.0), n, k)


@pytest.mark.parametrize(("text", "n"), [("constant:1*slow:0=2", 3), ("chen2016", 101)])
def test_what_has_no_formula_is_sent_to_the_simulator(text: str, n: int) -> None:
    with pytest.raises(BadInput) as caught:
        order_statistic_mean(parse_latency(text), n, 2)
    assert text in str(caught.value)
    assert "simulate" in str(caught.value)
