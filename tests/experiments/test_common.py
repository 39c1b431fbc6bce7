"""What experiments share beside their trials: curves, tuning, spread and drawing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common.curves import Point, first_reaching, train_curve
from experiments.common.drawing import band, figure_in
from experiments.common.made_up import pictures
from experiments.common.spread import markdown, spread_of
from experiments.common.tuning import tuned

import quorate
from tests.toy_tasks import Toy

# ---------------------------------------------------------------- curves


class Measured(Toy):
    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {"accuracy": 0.5, "test_loss": 2.0}


def test_a_curve_has_a_point_for_each_evaluation() -> None:
    points = train_curve(
        Measured(samples=64),
        quorate.BackupSync(3, 1),
        quorate.Simulated(4, "constant:2"),
        "accuracy",
        updates=6,
        batch_size=4,
        evaluate_every=2,
    )
    assert points == [Point(2, 4.0, 24, 0.5, 2.0), Point(4, 8.0, 48, 0.5, 2.0), Point(6, 12.0, 72, 0.5, 2.0)]


def test_a_curve_that_diverges_says_so_at_its_last_point() -> None:
    class Broken(Measured):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, batch) * math.nan

    options: dict[str, Any] = {"updates": 1000, "batch_size": 4}
    (point,) = train_curve(Broken(samples=64), quorate.FullSync(), quorate.Simulated(2), "accuracy", **options)
    assert point.diverged == 1 and point.update == 0 and math.isnan(point.measure)


def at(update: int, measure: float) -> Point:
    return Point(update, 10.0 * update, 100 * update, measure, 0.0)


def test_first_reaching_lies_between_two_points_in_a_straight_line() -> None:
    rising = [at(1, 0.2), at(2, 0.6), at(3, 0.4), at(4, 0.9)]
    assert first_reaching(rising, 0.5) == Point(2, 17.5, 175, 0.5, 0.0)
    assert first_reaching(rising, 0.9) == at(4, 0.9)
    assert first_reaching(rising, 0.1) == at(1, 0.2)
    assert first_reaching(rising, 0.91) is None
    assert first_reaching([], 0.5) is None
    falling = [at(1, 3.0), at(3, 2.0)]
    assert first_reaching(falling, 2.5, rising=False) == at(2, 2.5)
    assert first_reaching(falling, 1.9, rising=False) is None


def test_a_measure_that_is_nan_reaches_nothing_and_is_no_end_of_a_line() -> None:
    assert first_reaching([at(1, 0.2), at(2, math.nan), at(3, 0.6)], 0.4) == at(2, 0.4)
    assert first_reaching([at(1, math.nan)], 0.4) is None


# ---------------------------------------------------------------- tuning


def chosen(best: float, first: list[float], most: int) -> tuple[list[float], float]:
    """Rates that are tried, in their order, and the one that is taken; the nearer to `best`, the better."""
    known: dict[float, float] = {}
    tried = []
    while True:
        trials, taken = tuned(first, lambda rate: rate, known.get, most)
        missing = [rate for rate in trials if rate not in known]
        if taken is not None:
            assert not missing
            return tried, taken
        assert missing, "nothing to run, and nothing chosen"
        tried.append(missing[0])
        known[missing[0]] = -abs(math.log(missing[0] / best))


def test_a_best_rate_inside_the_grid_ends_the_tuning() -> None:
    assert chosen(0.2, [0.1, 0.2, 0.4], most=6) == ([0.1, 0.2, 0.4], 0.2)


def test_a_best_rate_at_an_edge_is_looked_beyond_on_either_side() -> None:
    assert chosen(0.02, [0.1, 0.2, 0.4], most=6) == ([0.1, 0.2, 0.4, 0.05, 0.025, 0.0125], 0.025)
    assert chosen(1.7, [0.4, 0.1, 0.2], most=9) == ([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], 1.6)


def test_the_edge_is_taken_when_all_that_may_be_tried_is() -> None:
    assert chosen(100.0, [0.1, 0.2], most=4) == ([0.1, 0.2, 0.4, 0.8], 0.8)
    assert chosen(100.0, [0.1, 0.2], most=2) == ([0.1, 0.2], 0.2)
    assert chosen(0.3, [0.3], most=3) == ([0.3, 0.15, 0.6], 0.3)


def test_scores_below_nothing_and_nan_are_compared_rightly() -> None:
    scores = {0.5: math.nan, 1.0: -3.0, 2.0: -2.0, 4.0: math.nan}
    assert tuned([0.5, 1.0, 2.0, 4.0], lambda rate: rate, scores.get, 8) == ([0.5, 1.0, 2.0, 4.0], 2.0)
    zero = {1.0: -1.0, 2.0: 0.0, 4.0: -0.5}
    assert tuned([1.0, 2.0, 4.0], lambda rate: rate, zero.get, 8)[1] == 2.0


# ---------------------------------------------------------------- spread


@pytest.mark.parametrize("count", [2, 3, 5, 16, 17, 40])
def test_an_interval_is_that_of_scipy(count: int) -> None:
    from scipy import stats

    values = [math.sin(number) + 0.1 * number for number in range(count)]
    spread = spread_of(values)
    low, high = stats.t.interval(0.95, count - 1, loc=spread.mean, scale=stats.sem(values))
    assert spread.mean == pytest.approx(sum(values) / count)
    assert spread.half_width == pytest.approx((high - low) / 2, rel=5e-3)
    assert (spread.lowest, spread.highest, spread.seeds) == (min(values), max(values), count)


def test_what_is_not_finite_is_seen() -> None:
    for values in ([math.nan, 1.0], [1.0, math.nan, 2.0]):
        spread = spread_of(values)
        assert all(map(math.isnan, spread[:4])) and spread.seeds == len(values)
    forever = spread_of([1.0, math.inf])
    assert forever.mean == math.inf and math.isnan(forever.half_width)
    with pytest.raises(ValueError, match="no values"):
        spread_of([])


def test_a_spread_as_a_text_and_a_table() -> None:
    assert spread_of([0.5]).text() == "0.5"
    assert spread_of([0.781, 0.781, 0.781]).text(1, scale=100) == "78.1 ± 0.0"
    assert markdown(["a", "b"], [[1, "x"], [2, "y"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |\n"


# ---------------------------------------------------------------- drawing


def test_a_band_goes_from_the_lowest_to_the_highest_to_where_the_longest_curve_ends(tmp_path: Path) -> None:
    with figure_in(tmp_path / "figure.png") as axes:
        band(axes, [[(0, 1.0), (2, 3.0)], [(0, 3.0), (1, 3.0), (4, 9.0)]], "#000000", "two")
        band(axes, [[(0, 1.0), (1, 2.0)]], "#ff0000", "one")
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines["two"].get_xdata()) == [0, 1, 4]
        assert list(lines["two"].get_ydata()) == [2.0, 2.5, 6.0]
        assert list(lines["one"].get_ydata()) == [1.0, 2.0]
        (between,) = axes.collections
        heights = between.get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == (1.0, 9.0)
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_the_same_figure_twice_has_the_same_bytes_and_a_failed_one_leaves_no_file(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        with figure_in(tmp_path / name, 1, 2) as (left, right):
            left.plot([1, 2])
            right.plot([2, 1])
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    with pytest.raises(ZeroDivisionError), figure_in(tmp_path / "three.png"):
        raise ZeroDivisionError
    assert not (tmp_path / "three.png").exists()


def test_made_up_pictures_can_be_told_apart() -> None:
    images, labels = pictures(64, kinds=4).tensors
    assert images.dtype == torch.uint8 and images.shape == (64, 3, 32, 32)
    quarters = images.float().mean(1).unfold(1, 16, 16).unfold(2, 16, 16).mean((3, 4)).flatten(1)
    assert (quarters.argmax(1) == labels).float().mean() > 0.9
