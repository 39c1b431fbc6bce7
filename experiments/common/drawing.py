"""How all figures of experiments look. matplotlib is imported only here, and opens no window."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.reporting.figures import COLOURS, STYLE, check_can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLOURS",
    "PALETTE",
    "PUBLISHED",
    "REPAIR_COLOURS",
    "Tuning",
    "band",
    "figure_in",
    "in_words",
    "legend_under",
    "outer_legend",
    "rate_grids",
    "seeds",
    "shades",
    "ticks",
]

#: Inches and dots an inch: every figure is as wide as a page of 1280 pixels, so text has one size in all of them.
_WIDTH, _DPI = 8.0, 160
#: For what is neither a policy (COLOURS) nor ordered (`shades`); distinct for colour-blind readers, too.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Published figures, and one worker alone.
PUBLISHED = "#000000"
#: What is done about old gradients.
REPAIR_COLOURS = {
    "none": "#7F7F7F",
    "own rate": "#56B4E9",
    "warm-up": "#E69F00",
    "warm-up and own rate": "#D55E00",
    "clipping": "#009E73",
    "momentum": "#882255",
    "compensation": "#CC79A7",
}
#: Latency models as titles have them.
_IN_WORDS = {
    "chen2016": "the paper's stragglers",
    "pareto:0.6,1.6": "heavy tail (Pareto, α = 1.6)",
    "lognormal:1,0.5": "lognormal tail, σ = 0.5",
    "shifted-exp:0.9,0.1": "mild exponential tail",
    "lognormal:1.5,0.1*slow:0=5": "one worker 5× as slow",
    "lognormal:1.5,0.2*pauses:0.05,10": "heavy tail: 1 ticket in 20 takes 10× as long",
}


def in_words(latency: str) -> str:
    """A latency model as a title has it; one that no experiment has stays as it is written."""
    return _IN_WORDS.get(latency, latency)


class Tuning(NamedTuple):
    """A row of `rate_grids`. tried: rates, each with its measure, or None where the training failed."""

    name: str
    tried: Sequence[tuple[float, float | None]]
    chosen: float | None


@contextmanager
def figure_in(file: Path, rows: int = 1, columns: int = 1, height: float = 4.0, **options: Any) -> Iterator[Any]:
    """Axes to draw on (one, or an array of them); the file is written at the end. Options are those of `subplots`."""
    check_can_draw()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", dpi=_DPI)
        yield figure.subplots(rows, columns, **options)
        figure.savefig(file, metadata={"Software": None} if file.suffix == ".png" else None)


# ---------------------------------------------------------------- legends and axes


def outer_legend(panels: Iterable[Axes], columns: int = 6, where: str = "upper") -> None:
    """One legend for all these panels, above or below ("lower") all panels; a name of several stands there once."""
    shown: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(name, handle)
    if shown:
        figure: Any = axes.get_figure()
        place, columns = f"outside {where} center", min(columns, len(shown))
        figure.legend(shown.values(), shown, loc=place, ncols=columns, frameon=False)


def legend_under(axes: Axes, columns: int = 2) -> None:
    """A legend below the label of the horizontal axis."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns)


def ticks(axes: Axes, which: str, at: Sequence[float], names: Sequence[str] | None = None) -> None:
    """Ticks of an axis, "x" or "y", at these places and nowhere else: for logarithmic ones."""
    names = [f"{one:g}" for one in at] if names is None else names
    getattr(axes, f"set_{which}ticks")(at, names)
    getattr(axes, f"set_{which}ticks")([], minor=True)


# ---------------------------------------------------------------- colours and curves


def shades(count: int) -> list[Any]:
    """Colours of something that is ordered, from dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.88 * place / max(1, count - 1)) for place in range(count)]


def band(axes: Axes, curves: Sequence[Sequence[tuple[float, float]]], colour: Any, name: str, **looks: Any) -> None:
    """Several seeds of a curve as (x, y): their mean, and in a lighter colour from the lowest to the highest.

    Curves that are measured at the same x are averaged there; otherwise at the x of the one that goes furthest, where
    a shorter one stays as it ended.
    """
    at, values = _together(curves)
    axes.plot(at, [statistics.fmean(one) for one in values], color=colour, label=name, **looks)
    if len(curves) > 1:
        axes.fill_between(
            at, [min(one) for one in values], [max(one) for one in values], color=colour, alpha=0.18, lw=0
        )


def seeds(axes: Axes, curves: Sequence[Sequence[tuple[float, float]]], colour: Any, name: str, **looks: Any) -> None:
    """Several seeds of a curve as (x, y): their median, NaN where one of them is, and each of them as a thin line."""
    at, values = _together(curves)
    medians = [math.nan if any(map(math.isnan, one)) else statistics.median(one) for one in values]
    axes.plot(at, medians, color=colour, label=name, lw=1.7, **looks)
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), color=colour, lw=0.7, alpha=0.5, **looks)


def _together(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[list[float]]]:
    """The x of the curve that goes furthest, and what all of them have there."""
    at = [x for x, _ in max(curves, key=lambda curve: curve[-1][0])]
    return at, [[_at(curve, x) for curve in curves] for x in at]


def _at(curve: Sequence[tuple[float, float]], x: float) -> float:
    """The curve's height, between two points in a straight line, beyond its ends as there."""
    before = curve[0]
    if x <= before[0]:
        return before[1]
    for point in curve:
        if point[0] >= x:
            share = (x - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 1.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


# ---------------------------------------------------------------- tunings


def rate_grids(panels: Sequence[Axes], tunings: Sequence[Sequence[Tuning]], measure: str, log: bool = False) -> None:
    """Tunings as squares, a row for each, a panel for each list of rows: the darker, the less of the measure.

    A ring is round the rate that was chosen; a training that failed is a cross.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    values = [value for rows in tunings for row in rows for _, value in row.tried if value is not None] or [1.0]
    scale = (LogNorm if log else Normalize)(min(values), max(values))
    for axes, rows in zip(panels, tunings, strict=True):
        for place, row in enumerate(rows):
            for rate, value in row.tried:
                if value is None:
                    axes.plot([rate], [place], "x", ms=4, color="#AAAAAA")
                else:
                    axes.plot([rate], [place], "s", ms=6.5, color=colormaps["viridis"](scale(value)))
                if rate == row.chosen:
                    axes.plot([rate], [place], "o", ms=11, mfc="none", mec="black", mew=1.1)
        axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8.5)
        axes.set(xscale="log", ylim=(len(rows) - 0.4, -0.6))
    figure: Any = panels[0].get_figure()
    bar = figure.colorbar(ScalarMappable(scale, "viridis"), ax=list(panels), label=measure, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
