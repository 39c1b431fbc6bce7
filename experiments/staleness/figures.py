"""The study's figures and tables, from its curves alone."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.curves import Point
from experiments.common.drawing import PUBLISHED, REPAIR_COLOURS, Tuning, figure_in, outer_legend, rate_grids, ticks
from experiments.common.trials import Found
from experiments.staleness.settings import GUESSING, METHODS, Length, Trial, final_error, trainings_of, tuning_of
from experiments.staleness.tables import PAPER, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "none": REPAIR_COLOURS["none"],
    "ramp": REPAIR_COLOURS["warm-up"],
    "clip": REPAIR_COLOURS["clipping"],
    "rate": REPAIR_COLOURS["own rate"],
    "ramp and rate": REPAIR_COLOURS["warm-up and own rate"],
}
_NAMES = {
    "none": "no repair",
    "ramp": "staleness ramps up",
    "clip": "gradients clipped",
    "rate": "a rate of its own",
    "ramp and rate": "ramp and own rate",
}
_PAPER = "Chen et al. (2016)"

Trainings = dict[tuple[str, int], list[float]]
"""Test errors of the seeds, in per cent, by method and staleness."""


def draw_all(folder: Path, found: Found[Trial, Point], length: Length) -> list[Path]:
    """Every figure and table; gives the files that were written."""
    errors = _errors(found, length)
    files = [folder / name for name in ("staleness.png", "repairs.png", "tuning.png", "summary.md")]
    _draw_staleness(files[0], errors, length)
    _draw_repairs(files[1], errors, length)
    _draw_tuning(files[2], found, length)
    files[3].write_text(summary(found, length))
    return files


def _errors(found: Found[Trial, Point], length: Length) -> Trainings:
    errors: Trainings = {}
    for method in METHODS:
        for staleness in length.stalenesses_of(method):
            trials = trainings_of(staleness, method, found, length) or []
            seeds = [100 * final_error(found[trial]) for trial in trials if trial in found]
            if seeds:
                errors[method, staleness] = seeds
    return errors


def _draw_staleness(file: Path, errors: Trainings, length: Length) -> None:
    """What no repair, the paper's repair and the best one give, and what the paper has."""
    with figure_in(file, height=4.4) as axes:
        for method in ("none", "ramp and rate", "clip"):
            there = [staleness for staleness in length.stalenesses if (method, staleness) in errors]
            medians = [statistics.median(errors[method, staleness]) for staleness in there]
            axes.plot(there, medians, color=_COLOURS[method], label=_NAMES[method])
            for staleness in there:
                _draw_seeds(axes, staleness, errors[method, staleness], method)
        axes.plot(*zip(*PAPER.items(), strict=True), color=PUBLISHED, ls="--", marker="D", ms=4, label=_PAPER)
        axes.set(xlabel="staleness, updates (a dot is a seed, a line goes through the medians)", ylabel="test error, %")
        _set_error_scale(axes)
        outer_legend([axes])


def _draw_repairs(file: Path, errors: Trainings, length: Length) -> None:
    """What each repair gives where all were tried."""
    with figure_in(file, height=3.8) as axes:
        for place, method in enumerate(METHODS):
            axes.plot([], [], "o", ms=5, color=_COLOURS[method], label=_NAMES[method])
            for at, staleness in enumerate(length.repaired):
                beside = 0.14 * (place - (len(METHODS) - 1) / 2)
                _draw_seeds(axes, at + beside, errors.get((method, staleness), []), method)
        for at, staleness in enumerate(length.repaired):
            if staleness in PAPER:
                axes.hlines(PAPER[staleness], at - 0.42, at + 0.42, color=PUBLISHED, ls="--", lw=1.2, label=_PAPER)
        axes.set_xticks(range(len(length.repaired)), [str(staleness) for staleness in length.repaired])
        axes.set(
            xlabel="staleness, updates", ylabel="test error of each seed, %", xlim=(-0.5, len(length.repaired) - 0.5)
        )
        axes.grid(axis="x", visible=False)
        _set_error_scale(axes)
        outer_legend([axes], 3)


def _draw_seeds(axes: Axes, at: float, errors: list[float], method: str) -> None:
    axes.plot([at] * len(errors), errors, "o", ms=5, alpha=0.75, mew=0, color=_COLOURS[method])


def _set_error_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks(axes, "y", [tick for tick in (0.2, 0.3, 0.5, 1, 2, 5, 10, 20, 50, 90) if low <= tick <= max(high, 1.5)])
    axes.axhline(100 * GUESSING, color="#AAAAAA", lw=0.9, ls=":")
    axes.annotate("diverged, or guessing", (1, 100 * GUESSING), (0, 3), **_AT_THE_RIGHT)


_AT_THE_RIGHT: Any = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "ha": "right",
    "fontsize": 8,
    "color": "#777777",
}


def _draw_tuning(file: Path, found: Found[Trial, Point], length: Length) -> None:
    """Rates of the paper's repair at every staleness, norms of clipping where it was tried."""
    with figure_in(file, 1, 2, 3.6, width_ratios=(1.6, 1)) as panels:
        tunings = [
            [_tuning(staleness, method, found, length) for staleness in length.stalenesses_of(method)]
            for method in ("ramp and rate", "clip")
        ]
        rate_grids(panels, tunings, "loss on held-out pictures\nafter a short training", log=True)
        for axes, method, number in zip(panels, ("ramp and rate", "clip"), ("learning rate", "norm"), strict=True):
            axes.set(title=_NAMES[method], xlabel=f"{number} (ring: chosen, cross: diverged)", ylabel="staleness")


def _tuning(staleness: int, method: str, found: Found[Trial, Point], length: Length) -> Tuning:
    def number(trial: Trial) -> float:
        return trial.clip if method == "clip" else trial.lr

    trials, best = tuning_of(staleness, method, found, length)
    ends = {number(trial): found[trial][-1] for trial in trials if trial in found}
    tried = [(one, None if end.diverged or math.isnan(end.loss) else end.loss) for one, end in ends.items()]
    return Tuning(str(staleness), tried, None if best is None else number(best))
