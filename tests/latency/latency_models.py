"""Random latency models, for the laws that hold for all of them."""

from hypothesis import settings
from hypothesis import strategies as st

from quorate.latency import (
    Chen2016,
    Constant,
    Independent,
    Latency,
    Lognormal,
    Pareto,
    Pause,
    Pauses,
    Quantiles,
    ShiftedExponential,
    Slow,
    Spells,
)

WORKERS = 8

# No deadline: the first draw of a process builds tables, and machines differ.
law = settings(deadline=None)

seconds = st.floats(1e-6, 1e6)
factors = st.floats(1.0, 1e3)
shares = st.floats(0.0, 1.0)
seeds = st.integers(0, 2**64)


@st.composite
def _quantiles(draw: st.DrawFn) -> Quantiles:
    inner = sorted(draw(st.sets(st.floats(1e-3, 0.999), max_size=5)))
    levels = [0.0, *inner, 1.0]
    times = sorted(draw(st.lists(seconds, min_size=len(levels), max_size=len(levels))))
    return Quantiles(tuple(zip(times, levels, strict=True)))


independent: st.SearchStrategy[Independent] = st.one_of(
    st.builds(Constant, seconds),
    st.builds(ShiftedExponential, st.floats(0.0, 1e6), seconds),
    st.builds(Lognormal, seconds, st.floats(0.0, 10.0)),
    st.builds(Pareto, seconds, st.floats(0.2, 50.0)),
    _quantiles(),
    st.builds(Pause, seconds, shares, factors),
)


@st.composite
def _spells(draw: st.DrawFn, model: st.SearchStrategy[Latency]) -> Spells:
    every_s = draw(st.floats(0.1, 1e4))
    return Spells(draw(model), every_s, every_s * draw(shares), draw(factors), draw(shares))


def _modified(model: st.SearchStrategy[Latency]) -> st.SearchStrategy[Latency]:
    slow = st.dictionaries(st.integers(0, WORKERS - 1), st.floats(1e-2, 1e2), min_size=1)
    return st.one_of(st.builds(Slow, model, slow), st.builds(Pauses, model, shares, factors), _spells(model))


models: st.SearchStrategy[Latency] = st.recursive(st.one_of(independent, st.just(Chen2016())), _modified, max_leaves=3)

calls = st.lists(
    st.tuples(st.integers(0, WORKERS - 1), st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0.0, 1e6)),
    min_size=1,
    max_size=20,
)
