"""The study's figures and tables, from its curves alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.curves import Point
from experiments.common.drawing import figure_in
from experiments.common.trials import Found
from experiments.staleness.settings import METHODS, Length, Trial, tuning_of
from experiments.staleness.tables import PAPER, Outcome, outcomes, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "none": "#7F7F7F",
    "ramp": "#E69F00",
    "clip": "#009E73",
    "rate": "#0072B2",
    "ramp and rate": "#D55E00",
}
_NAMES = {
    "none": "no repair",
    "ramp": "staleness ramps up",
    "clip": "gradients clipped",
    "rate": "a rate of its own",
    "ramp and rate": "ramp and own rate",
}

Made = dict[tuple[str, int], Outcome]


def draw_all(folder: Path, found: Found[Trial, Point], length: Length) -> list[Path]:
    """Every figure and table; gives the files that were written."""
    made = outcomes(found, length)
    files = [folder / name for name in ("staleness.png", "repairs.png", "tuning.png", "summary.md")]
    with figure_in(files[0], size=(6.4, 4.2)) as axes:
        _draw_staleness(axes, made, length)
    with figure_in(files[1], size=(6.4, 3.6)) as axes:
        _draw_repairs(axes, made, length)
    with figure_in(files[2], size=(6.4, 3.8)) as axes:
        _draw_tuning(axes, found, length)
    files[3].write_text(summary(found, length))
    return files


def _draw_staleness(axes: Axes, made: Made, length: Length) -> None:
    for method in ("none", "ramp and rate"):
        there = [staleness for staleness in length.stalenesses if (method, staleness) in made]
        _draw_points(axes, list(map(float, there)), [made[method, staleness] for staleness in there], method, "-")
    axes.plot(
        list(PAPER),
        list(PAPER.values()),
        color="black",
        ls="--",
        marker="D",
        ms=4,
        label="Chen et al. (2016), from their figure",
    )
    axes.set(xlabel="staleness, updates", ylabel="test error, %")
    _set_error_scale(axes)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)


def _draw_repairs(axes: Axes, made: Made, length: Length) -> None:
    for place, method in enumerate(METHODS):
        there = [at for at, staleness in enumerate(length.repaired) if (method, staleness) in made]
        beside = 0.14 * (place - (len(METHODS) - 1) / 2)
        _draw_points(
            axes, [at + beside for at in there], [made[method, length.repaired[at]] for at in there], method, ""
        )
    for at, staleness in enumerate(length.repaired):
        if staleness in PAPER:
            name = "Chen et al. (2016)" if at == 0 else "_"  # once in the legend
            axes.hlines(PAPER[staleness], at - 0.42, at + 0.42, color="black", ls="--", lw=1.2, label=name)
    axes.set_xticks(range(len(length.repaired)), [f"staleness {staleness}" for staleness in length.repaired])
    axes.set(ylabel="test error, %", xlim=(-0.5, len(length.repaired) - 0.5))
    _set_error_scale(axes)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_points(axes: Axes, at: list[float], there: list[Outcome], method: str, line: str) -> None:
    """Mean errors in per cent, with the 95 % interval as far as it is above nothing and below all."""
    means = [100 * outcome.error.mean for outcome in there]
    half = [0.0 if outcome.error.seeds < 2 else 100 * outcome.error.half_width for outcome in there]
    below = [min(one, 0.9 * mean) for one, mean in zip(half, means, strict=True)]
    above = [min(one, 100 - mean) for one, mean in zip(half, means, strict=True)]
    axes.errorbar(
        at,
        means,
        yerr=[below, above],
        color=_COLOURS[method],
        ls=line,
        marker="o",
        ms=4,
        capsize=2.5,
        label=_NAMES[method],
    )


def _set_error_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.2, 0.3, 0.5, 1, 2, 5, 10, 20, 50, 90) if low <= tick <= max(high, 1.5)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


def _draw_tuning(axes: Axes, found: Found[Trial, Point], length: Length) -> None:
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    for place, staleness in enumerate(length.stalenesses):
        trials = [trial for trial in tuning_of(staleness, "ramp and rate", found, length)[0] if trial in found]
        points = sorted((trial.lr, found[trial][-1].loss) for trial in trials if not found[trial][-1].diverged)
        if points:
            shade = shades(0.92 * place / max(1, len(length.stalenesses) - 1))
            axes.plot(*zip(*points, strict=True), color=shade, marker="o", ms=3.5, label=f"{staleness}")
    axes.set(xlabel="initial learning rate", ylabel="loss on held-out pictures\nafter a short training")
    axes.set_xscale("log")
    axes.set_yscale("log")
    rates = sorted({trial.lr for trial in found if trial.is_tuning})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xticks([], minor=True)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")
    if axes.get_lines():
        axes.legend(title="staleness\n(ramped)", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
