"""Sums in pieces, ahead of time and by several threads have the bits of a plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quorate.engines.shared import update
from quorate.engines.shared.shared_memory import BlockLayout
from quorate.engines.shared.update import Averager, Source
from quorate.flat import Flat

SCALES = [1.0, 0.5, 2.0, 4 / 7, 1e-3]


class Parts(nn.Module):
    """Parameters of these sizes, some in double precision."""

    def __init__(self, sizes: list[int], doubles: list[bool]) -> None:
        super().__init__()
        for number, (size, double) in enumerate(zip(sizes, doubles, strict=True)):
            kind = torch.float64 if double else torch.float32
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size, dtype=kind)))


@st.composite
def sums(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    wire = draw(st.sampled_from(["fp32", "bf16"]))
    doubles = [draw(st.booleans()) and wire == "fp32" for _ in sizes]
    return {
        "layout": BlockLayout(Parts(sizes, doubles), wire),
        "scales": draw(st.lists(st.sampled_from(SCALES), min_size=1, max_size=6)),
        "begun": draw(st.lists(st.integers(1, 6), max_size=3)),  # how many are summed ahead, time after time
        "piece": draw(st.sampled_from([1, 3, 8, 16, 1000])),
        "rate": draw(st.sampled_from([0.1, 1.0, 1e-3])),
        "seed": draw(st.integers(0, 2**32)),
        "bad": draw(
            st.none() | st.tuples(st.integers(0, 5), st.integers(0, 200), st.sampled_from([math.nan, math.inf]))
        ),
    }


def gradients(case: dict[str, Any]) -> list[Flat]:
    """Random ones, as they lie in blocks: the padding between parameters is zero."""
    layout, random = case["layout"], torch.Generator().manual_seed(case["seed"])
    found = []
    for number in range(len(case["scales"])):
        flat = Flat(layout.gradient, torch.device("cpu"))
        for place, view in enumerate(flat.views):
            view.copy_(torch.randn(view.shape, generator=random))
            if case["bad"] is not None and case["bad"][0] == number and place == 0 and view.numel():
                view[case["bad"][1] % view.numel()] = case["bad"][2]
        found.append(flat)
    return found


def plain_mean(grads: list[Tensor], scales: list[float], total: float, kind: torch.dtype) -> Tensor:
    """One after the other, whole."""
    grads = [grad.to(kind) for grad in grads]
    mean = grads[0] if scales[0] == 1.0 else grads[0] * scales[0]
    for grad, scale in zip(grads[1:], scales[1:], strict=True):
        mean = torch.add(mean, grad, alpha=scale)
    return mean if total == 1.0 else mean / total


@given(case=sums())
def test_the_bits_of_a_plain_loop(case: dict[str, Any]) -> None:
    layout, scales = case["layout"], case["scales"]
    flats = gradients(case)
    sources = [Source(layout.gradient.runs(flat.buffer), scale) for flat, scale in zip(flats, scales, strict=True)]
    total = sum(scales)
    expected = [
        plain_mean([flat.views[place] for flat in flats], scales, total, kind)
        for place, kind in enumerate(layout.params.dtypes)
    ]
    finite = all(bool(torch.isfinite(mean).all()) for mean in expected)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(update, "PIECE", case["piece"])
        patched.setattr(update, "_FEW", 1)
        averager = Averager(layout)
    try:
        done = fold_some(averager, sources, case["begun"])
        assert averager.average(sources[done:], total, done > 0) == finite
        if finite:
            assert all(torch.equal(view, mean) for view, mean in zip(averager.sum.views, expected, strict=True))
        check_descent(case, averager, sources, total, expected, finite)
    finally:
        averager.close()


def fold_some(averager: Averager, sources: list[Source], begun: list[int]) -> int:
    done = 0
    for count in begun:
        if done + count > len(sources):
            break
        averager.fold(sources[done : done + count], begun=done > 0)
        done += count
    return done


def check_descent(
    case: dict[str, Any],
    averager: Averager,
    sources: list[Source],
    total: float,
    means: list[Tensor],
    finite: bool,
) -> None:
    params, device, rate = case["layout"].params, torch.device("cpu"), case["rate"]
    old, new = Flat(params, device), Flat(params, device)
    random = torch.Generator().manual_seed(case["seed"] + 1)
    for view in old.views:
        view.copy_(torch.randn(view.shape, generator=random))
    before = [view.clone() for view in old.views]
    done = fold_some(averager, sources, case["begun"])
    fine = averager.descend(sources[done:], total, done > 0, params.runs(old.buffer), params.runs(new.buffer), rate)
    assert fine == finite
    if finite:
        for place, view in enumerate(new.views):
            assert torch.equal(view, torch.add(old.views[place], means[place], alpha=-rate))
    assert all(torch.equal(one, other) for one, other in zip(before, old.views, strict=True)), "the old version stays"
    averager.copy(params.runs(old.buffer), params.runs(new.buffer))
    assert torch.equal(old.buffer, new.buffer)


def test_pieces_are_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is done once, by whoever takes it."""
    monkeypatch.setattr(update, "PIECE", 16)
    averager = Averager(BlockLayout(Parts([16 * 500], [False]), "fp32"))
    averager._helpers = 3
    done: list[tuple[int, int, int]] = []
    try:
        assert averager._each_piece(lambda *piece: done.append(piece) is None)
        assert sorted(done) == [(0, start, start + 16) for start in range(0, 8000, 16)]
        assert not averager._each_piece(lambda run, start, stop: start != 4000)
    finally:
        averager.close()
    averager.close()


def test_an_error_in_a_thread_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "PIECE", 16)
    averager = Averager(BlockLayout(Parts([16 * 500], [False]), "fp32"))
    averager._helpers = 2

    def fail(run: int, start: int, stop: int) -> bool:
        raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            averager._each_piece(fail)
    finally:
        averager.close()
