"""The committed figures: what a reader of a page can take in at a glance."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from experiments.__main__ import NAMES, experiment
from experiments.common.drawing import COLOURS, Tuning, figure_in, outer_legend, rate_grids, seeds
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

PAGE_PIXELS = 1280
MOST_LINES = 6
#: As latency models are written: "lognormal:1.5,0.2*pauses:0.05,10", "chen2016".
CODE = re.compile(r"[a-z]:\d|^chen2016$")


@pytest.mark.experiments
@pytest.mark.parametrize("name", NAMES)
def test_a_figure_fits_the_page_has_words_for_titles_few_lines_and_its_legends_beside_the_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Figure] = {}
    save = Figure.savefig

    def keep(figure: Figure, file: Path, **options: Any) -> None:
        drawn[file.stem] = figure
        save(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    for table in experiment(name).results.glob("*.csv"):
        shutil.copy(table, tmp_path)
    experiment(name).figures(tmp_path)
    assert drawn
    for file, figure in drawn.items():
        assert round(figure.get_figwidth() * figure.dpi) == PAGE_PIXELS
        panels = [axes for axes in figure.axes if axes.get_visible()]
        for axes in panels:
            place = axes.get_subplotspec()
            if place is not None and place.is_last_row():
                assert axes.get_xlabel() or figure.get_supxlabel(), f"an axis of {file} has no name"
            assert not CODE.search(axes.get_title()), (file, axes.get_title())
            assert _lines(axes) <= MOST_LINES, (file, axes.get_title())
        for legend in [*figure.legends, *(axes.get_legend() for axes in panels)]:
            assert legend is None or _lies_beside(legend, panels), f"a legend of {file} is cut off, or lies on data"


def _lines(axes: Axes) -> int:
    """Curves of a panel; thin ones are single seeds, two points a target or a mean."""
    lines = [one for one in axes.get_lines() if one.get_linestyle() != "None" and one.get_linewidth() >= 1]
    return sum(len(one.get_path()) > 2 for one in lines)


def _lies_beside(legend: Legend, panels: list[Axes]) -> bool:
    box = legend.get_window_extent()
    is_whole = box.x0 >= 0 and box.x1 <= PAGE_PIXELS
    return is_whole and not any(box.overlaps(axes.get_window_extent()) for axes in panels)


def test_seeds_are_thin_lines_round_their_median(tmp_path: Path) -> None:
    with figure_in(tmp_path / "figure.png") as axes:
        curves = [[(0, 1.0), (1, 9.0)], [(0, 2.0), (1, 2.0)], [(0, 30.0), (1, 3.0)]]
        seeds(axes, [*curves[:2], [*curves[2], (2, math.nan)]], "#000000", "three")
        median, *single = axes.get_lines()
        assert str(list(map(float, median.get_path().vertices[:, 1]))) == "[2.0, 3.0, nan]" and len(single) == 3
        assert all(one.get_linewidth() < median.get_linewidth() for one in single)


def test_a_name_of_several_panels_stands_in_their_legend_once(tmp_path: Path) -> None:
    with figure_in(tmp_path / "figure.png", 1, 2) as panels:
        for axes, names in zip(panels, (("a", "b"), ("b", "c")), strict=True):
            for name in names:
                axes.plot([1, 2], label=name)
        outer_legend(panels)
        (legend,) = panels[0].get_figure().legends
        assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]


def test_a_tuning_has_a_square_for_each_rate_a_cross_where_it_failed_and_a_ring_round_the_chosen_one(
    tmp_path: Path,
) -> None:
    with figure_in(tmp_path / "figure.png") as axes:
        rate_grids([axes], [[Tuning("one", [(0.1, 5.0), (0.2, 3.0), (0.4, None)], 0.2)]], "loss")
        marks = [(line.get_marker(), list(line.get_xdata())) for line in axes.get_lines()]
        assert marks == [("s", [0.1]), ("s", [0.2]), ("o", [0.2]), ("x", [0.4])]
        assert axes.get_lines()[0].get_color() != axes.get_lines()[1].get_color()
        assert [label.get_text() for label in axes.get_yticklabels()] == ["one"]


def test_policies_have_colours_of_their_own() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
