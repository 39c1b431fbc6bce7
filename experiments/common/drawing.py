"""How all figures of experiments look. matplotlib is imported only here, and opens no window."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.reporting.figures import COLOURS, STYLE, check_can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "band", "figure_in"]


@contextmanager
def figure_in(
    file: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.0), **options: Any
) -> Iterator[Any]:
    """Axes to draw on (one, or an array of them); the file is written at the end. Options are those of `subplots`."""
    check_can_draw()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained", dpi=160)
        yield figure.subplots(rows, columns, **options)
        figure.savefig(file, metadata={"Software": None} if file.suffix == ".png" else None)


def band(axes: Axes, curves: Sequence[Sequence[tuple[float, float]]], colour: str, name: str, **looks: Any) -> None:
    """Several seeds of a curve as (x, y): their mean, and in a lighter colour from the lowest to the highest.

    Curves that are measured at the same x are averaged there; otherwise at the x of the one that goes furthest, where
    a shorter one stays as it ended.
    """
    at = [x for x, _ in max(curves, key=lambda curve: curve[-1][0])]
    values = [[_at(curve, x) for curve in curves] for x in at]
    axes.plot(at, [statistics.fmean(one) for one in values], color=colour, label=name, **looks)
    if len(curves) > 1:
        axes.fill_between(
            at, [min(one) for one in values], [max(one) for one in values], color=colour, alpha=0.18, lw=0
        )


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
