"""What holds for the draws of every latency model."""

import math
import pickle
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quorate.errors import BadInput
from quorate.latency import Chen2016, Constant, Independent, Latency, ShiftedExponential, parse_latency
from quorate.seeds import derive, uniform
from tests.latency.latency_models import WORKERS, calls, independent, law, models, seeds

Call = tuple[int, int, int, float]


@law
@given(models, seeds, calls, st.randoms(use_true_random=False))
def test_draws_do_not_depend_on_the_order_of_calls(model: Latency, seed: int, calls: list[Call], random) -> None:
    draw = model.sampler(seed, WORKERS)
    first = {call: draw(*call) for call in calls}
    again = calls * 2
    random.shuffle(again)
    other = model.sampler(seed, WORKERS)
    assert all(other(*call) == first[call] for call in again)


@law
@given(models, seeds, calls)
def test_more_workers_leave_the_draws_of_the_others_alone(model: Latency, seed: int, calls: list[Call]) -> None:
    few, many = model.sampler(seed, WORKERS), model.sampler(seed, 5 * WORKERS)
    assert [few(*call) for call in calls] == [many(*call) for call in calls]


@law
@given(models, seeds, calls)
def test_draws_are_positive_finite_and_within_the_longest(model: Latency, seed: int, calls: list[Call]) -> None:
    draw = model.sampler(seed, WORKERS)
    for call in calls:
        time_s = draw(*call)
        assert isinstance(time_s, float)
        assert 0.0 < time_s <= model.longest() * (1 + 1e-12) < math.inf


@law
@given(models)
def test_the_text_reads_back_as_the_same_model(model: Latency) -> None:
    again = parse_latency(model.text())
    assert again == model
    assert hash(again) == hash(model)
    assert again.text() == model.text()


@law
@given(models, seeds, calls)
def test_a_model_can_be_sent_to_another_process(model: Latency, seed: int, calls: list[Call]) -> None:
    copy = pickle.loads(pickle.dumps(model))
    assert copy == model
    assert copy.sampler(seed, WORKERS)(*calls[0]) == model.sampler(seed, WORKERS)(*calls[0])


@law
@given(independent, seeds, calls)
def test_independent_draws_are_the_quantile_of_their_own_uniform(
    model: Independent, seed: int, calls: list[Call]
) -> None:
    draw = model.sampler(seed, WORKERS)
    for worker, step, row, time_s in calls:
        expected = model.quantile(uniform(derive(seed, "latency", worker), step))
        assert draw(worker, step, row, time_s) == expected


@law
@given(independent, st.lists(st.floats(1e-9, 1 - 1e-9), min_size=2))
def test_quantiles_do_not_fall(model: Independent, levels: list[float]) -> None:
    times = [model.quantile(u) for u in sorted(levels)]
    # Neighbouring levels can round to times that differ in the last bit.
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


@law
@given(independent, st.floats(0.01, 0.99))
def test_the_upper_quantile_is_the_quantile_seen_from_above(model: Independent, u: float) -> None:
    assume(all(abs(u - kink) > 1e-9 for kink in model.kinks()))
    assert model.upper_inverse()(1.0 - u) == pytest.approx(model.quantile(u), rel=1e-9)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, math.nan])
def test_a_quantile_needs_a_level_between_0_and_1(level: float) -> None:
    for ask in (Constant(1.0).quantile, lambda u: Chen2016().time_to(5, u)):
        with pytest.raises(BadInput, match=f"level {level!r}"):
            ask(level)


def test_seeds_workers_and_steps_draw_differently() -> None:
    model = ShiftedExponential(0.05, 0.025)
    draws = {
        model.sampler(seed, 4)(worker, step, 0, 0.0) for seed in range(4) for worker in range(4) for step in range(4)
    }
    assert len(draws) == 64


MEANS = [
    "constant:0.05",
    "shifted-exp:0.05,0.025",
    "lognormal:0.05,0.4",
    "pareto:0.05,4",
    "quantiles:0.05@0,0.06@0.5,0.2@1",
    "pause:0.05,0.04,10",
    "chen2016",
    "quantiles:0.05@0,0.06@0.5,0.2@1*pauses:0.05,10",
]


@pytest.mark.parametrize("text", MEANS)
def test_the_mean_is_that_of_the_draws(text: str) -> None:
    model = parse_latency(text)
    workers, rows = 100, 2000
    draw = model.sampler(7, workers)
    times = [draw(worker, row, row, 0.0) for worker in range(workers) for row in range(rows)]
    mean = model.mean()
    assert mean is not None
    assert math.fsum(times) / len(times) == pytest.approx(mean, rel=0.01)


def test_the_mean_of_a_heavy_tail_is_infinite_and_of_a_mixed_crowd_unknown() -> None:
    assert parse_latency("pareto:0.05,1").mean() == math.inf
    assert parse_latency("constant:1*slow:0=2").mean() is None
    assert parse_latency("constant:1*spells:10,1,2").mean() is None
    assert parse_latency("constant:1*slow:0=2*pauses:0.5,2").mean() is None
