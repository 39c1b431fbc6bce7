"""Several seeds of one method: their mean, and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

#: Student's t for a two-sided interval of 95 %, by degrees of freedom; here so that a run needs no scipy.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Spread(NamedTuple):
    """Of some numbers: one that is NaN makes all of it NaN, so that what diverged is seen."""

    mean: float
    half_width: float  # of the 95 % interval of the mean; NaN for a single number
    lowest: float
    highest: float
    seeds: int

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """As "78.1 ± 0.4"."""
        shown = f"{scale * self.mean:.{digits}f}"
        return shown if math.isnan(self.half_width) else f"{shown} ± {scale * self.half_width:.{digits}f}"


def spread_of(values: Sequence[float]) -> Spread:
    """Mean and 95 % interval."""
    if not values:
        raise ValueError("no values to take a mean of")
    count = len(values)
    if any(math.isnan(value) for value in values):
        return Spread(math.nan, math.nan, math.nan, math.nan, count)
    half = math.nan
    if count > 1 and all(math.isfinite(value) for value in values):
        t = _T95[count - 2] if count - 2 < len(_T95) else 1.96 + 2.4 / (count - 1)
        half = t * statistics.stdev(values) / math.sqrt(count)
    return Spread(statistics.fmean(values), half, min(values), max(values), count)


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as Markdown has it."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)
