"""The study's figures, from its tables alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.drawing import PALETTE, PUBLISHED, band, figure_in, legend_under, outer_legend, shades, ticks
from experiments.layers.profiles import PROFILES
from experiments.layers.published import STALENESS
from experiments.layers.study import (
    ALONE,
    EQUAL,
    INCEPTION,
    MODES,
    TRANSITS,
    USUAL,
    Depth,
    Staleness,
    TrainingsFound,
)
from experiments.layers.tables import DepthsFound, cases, finals, is_spread
from experiments.layers.timing import FORWARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODE_COLOURS = {**dict(zip(MODES, PALETTE, strict=False)), ALONE: PUBLISHED}


def draw_depth(file: Path, depths: DepthsFound) -> None:
    """Mean staleness by depth: by how layers are read and written, by where time goes, by transit; and its spread."""
    found = cases(depths)

    def seeds_of(*how: object) -> list[list[Staleness]] | None:
        return next((seeds for trial, seeds in found.items() if _how(trial) == how), None)

    with figure_in(file, 2, 2, 8.4) as panels:
        modes, profiles, transits, spreads = panels.flat
        for mode, how in MODES.items():
            _draw_mean(modes, seeds_of(EQUAL, *how, FORWARD, 0.0, USUAL), MODE_COLOURS[mode], _HOW[mode])
        modes.set_title("how parameters are read and gradients written\n(18 layers of equal time)")
        by_layer, early = MODES["layer by layer"], MODES["written by layer"]
        for profile, colour in zip((name for name in PROFILES if name != EQUAL), PALETTE, strict=False):
            _draw_mean(profiles, seeds_of(profile, *early, FORWARD, 0.0, USUAL), colour, profile)
            _draw_mean(profiles, seeds_of(profile, *by_layer, FORWARD, 0.0, USUAL), colour, "_hidden", ls=":")
        profiles.set_title("where a step's time goes\n(lines: read at the start, dotted: when needed)")
        for transit, colour in zip((0.0, *TRANSITS), shades(1 + len(TRANSITS)), strict=True):
            name = f"{transit:.0%} of a step each way" if transit else "no transit"
            _draw_mean(transits, seeds_of(INCEPTION, *by_layer, FORWARD, transit, USUAL), colour, name)
        transits.set_title("time in transit\n(Inception v3's times, read when needed)")
        for trial, seeds in found.items():
            if is_spread(trial) and trial.latency == USUAL:
                _draw_spread(spreads, seeds)
        spreads.set_title("spread over tickets\n(read at the start, written at once)")
        for axes in panels.flat:
            _draw_published(axes, with_range=axes is spreads)
            axes.set(xlabel="layer of 18 (18: next to the loss)", ylim=(0, 65 if axes is spreads else 45))
            axes.set_xticks([1, 6, 12, 18])
            legend_under(axes, 1 if axes is modes else 2)
        for axes in (modes, transits):
            axes.set_ylabel("staleness in updates")


_HOW = {
    "whole model": "all read at the start, all written at the end",
    "layer by layer": "read when needed, written at once",
    "read by layer": "read when needed, all written at the end",
    "written by layer": "all read at the start, written at once",
}


def _draw_mean(axes: Axes, seeds: list[list[Staleness]] | None, colour: Any, name: str, ls: str = "-") -> None:
    if seeds is not None:
        band(axes, _curves(seeds), colour, name, ls=ls)


def _how(trial: Depth) -> tuple[object, ...]:
    return trial.profile, trial.read, trial.write, trial.forward, trial.transit, trial.latency


def _depth(place: int, layers: int) -> float:
    """As a layer of 18."""
    return 1 + 17 * (place - 1) / (layers - 1)


def _curves(seeds: list[list[Staleness]]) -> list[list[tuple[float, float]]]:
    return [[(_depth(row.layer, len(rows)), row.mean) for row in rows] for rows in seeds]


def _draw_spread(axes: Axes, seeds: list[list[Staleness]]) -> None:
    at = [_depth(row.layer, len(seeds[0])) for row in seeds[0]]

    def of(one: str) -> list[float]:
        return [sum(getattr(rows[place], one) for rows in seeds) / len(seeds) for place in range(len(at))]

    axes.plot(at, of("mean"), color=PALETTE[0], label="mean")
    axes.fill_between(at, of("low"), of("high"), color=PALETTE[0], alpha=0.25, lw=0, label="95 % of tickets")
    axes.fill_between(at, of("lowest"), of("highest"), color=PALETTE[0], alpha=0.1, lw=0, label="lowest to highest")


def _draw_published(axes: Axes, with_range: bool) -> None:
    for number, (layer, seen) in enumerate(STALENESS.items()):
        error = None
        if with_range and not math.isnan(seen.lowest):
            error = [[seen.mean - seen.lowest], [seen.highest - seen.mean]]
        axes.errorbar(
            layer, seen.mean, yerr=error, fmt="ko", ms=4, capsize=3, label="published" if number == 0 else None
        )


def draw_training(file: Path, trainings: TrainingsFound) -> None:
    """Left the tuning, right accuracy over updates at each mode's best rate."""
    with figure_in(file, 1, 2) as (rates, curves):
        for mode, colour in MODE_COLOURS.items():
            tried = sorted(
                (trial.lr, points[-1].test_loss)
                for trial, points in trainings.items()
                if trial.seed == 0 and trial.mode == mode and not points[-1].diverged
            )
            if tried:
                rates.plot(*zip(*tried, strict=True), color=colour, marker="o", ms=4, label=mode)
            found = list(finals(trainings, mode).values())
            if found:
                lines = [[(float(point.update), 100 * point.accuracy) for point in points] for points in found]
                band(curves, lines, colour, mode)
        rates.set(xlabel="learning rate", ylabel="test loss at the end", xscale="log", title="tuning, one seed")
        tried_rates = sorted({trial.lr for trial in trainings if trial.seed == 0})
        ticks(rates, "x", tried_rates)
        curves.set(xlabel="updates", ylabel="test accuracy, %", title="each at its best rate")
        outer_legend([rates])
