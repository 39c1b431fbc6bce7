"""The study's figures, from its tables alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.drawing import COLOURS, PALETTE, PUBLISHED, band, figure_in, legend_under, outer_legend, shades
from experiments.stragglers import published
from experiments.stragglers.choosing import Found, by_seed, estimated_hours, time_to_target
from experiments.stragglers.measured import CONTENDING
from experiments.stragglers.simulated import MEAN
from experiments.stragglers.tables import MeasuredFound, of_world, relative_arrivals
from experiments.stragglers.worlds import MEASURED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The k-th arrivals of the left figure; the table has more.
SHOWN = (1, 50, 90, 98, 99, 100)
#: Panels of worlds.
PANELS = {
    "no tail, or a light one": ("no tail", "exponential, mild", "lognormal, s = 0.2"),
    "many steps late": ("exponential, strong", "lognormal, s = 0.5", "Pareto, α = 4"),
    "few steps, but very late": (MEASURED, "rare pauses, 1 % × 4", "Pareto, α = 2.5"),
    "slow workers, slow periods": ("one always slow, × 2", "all slow together", "a few slow for a while"),
}


def draw_arrivals(file: Path, found: Found) -> None:
    """Left the distribution of the k-th arrival, right its mean; dots are the paper's."""
    runs = list(of_world(found, MEASURED).values())
    machines = max(row.k for row in runs[0])
    shown = [k for k in SHOWN if k <= machines]
    with figure_in(file, 1, 2, 4.2) as (left, right):
        for k, colour in zip(shown, shades(len(shown)), strict=True):
            mean = [
                statistics.fmean(row.seconds for rows in runs for row in rows if (row.k, row.level) == (k, str(level)))
                for level in published.LEVELS
            ]
            left.plot(mean, published.LEVELS, color=colour, label=f"k = {k}")
            if machines == published.WORKERS:
                left.plot(published.TIME_QUANTILES_S[k], published.LEVELS, "o", ms=2.5, color=colour)
        left.set(xlabel="seconds until the k-th gradient", ylabel="share of rounds", xlim=(1.2, 4.0), ylim=(0, 1))
        left.set_title("distribution of arrivals (dots: published)")
        legend_under(left, 3)
        means = [[(row.k, row.seconds) for row in rows if row.level == MEAN] for rows in runs]
        band(right, means, COLOURS["full-sync"], "simulated")
        if machines == published.WORKERS:
            right.plot(*zip(*published.MEAN_S.items(), strict=True), "o", ms=3.5, color=PUBLISHED, label="published")
        right.set(xlabel="k", ylabel="mean seconds until the k-th gradient", ylim=(1.2, None), title="mean arrivals")
        legend_under(right)


def draw_choice(file: Path, found: Found) -> None:
    """Estimated hours by quorum."""
    with figure_in(file) as axes:
        curves = [list(estimated_hours(one).items()) for one in by_seed(found, MEASURED, "cancel").values()]
        band(axes, curves, COLOURS["backup"], "simulated arrivals × the paper's iterations")
        machines = max(n for n, _ in curves[0])
        if machines == published.WORKERS:
            axes.plot(
                *zip(*published.HOURS.items(), strict=True), "o", ms=4, color=PUBLISHED, label="published, figure 6"
            )
            axes.set(xlim=(49, 101), ylim=(30, 65))
        mean = {n: statistics.fmean(dict(curve)[n] for curve in curves) for n, _ in curves[0]}
        best = min(mean, key=lambda n: mean[n])
        axes.annotate(
            f"{best}+{machines - best}: {mean[best]:.1f} h",
            (best, mean[best]),
            (-70, -22),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": COLOURS["backup"]},
            color=COLOURS["backup"],
        )
        axes.set(xlabel=f"quorum N of {machines} workers", ylabel="estimated hours to convergence")
        outer_legend([axes])


def draw_tails(file: Path, found: Found) -> None:
    """Time to a target over that of all machines, by backups: tails, and what is none."""
    from matplotlib.lines import Line2D

    machines = max(trial.machines for trial in found)
    with figure_in(file, 2, 2, 7.4, sharey=True) as panels:
        for axes, (title, worlds) in zip(panels.flat, PANELS.items(), strict=True):
            for world, colour in zip(worlds, PALETTE, strict=False):
                _draw_world(axes, found, world, colour)
            axes.axhline(1.0, color="#777777", lw=0.8)
            axes.set(xlabel=f"backups of {machines} machines", title=title, xlim=(0, 0.2 * machines), ylim=(0, 1.3))
            axes.xaxis.get_major_locator().set_params(integer=True)
            legend_under(axes)
        for axes in panels[:, 0]:
            axes.set_ylabel("time to a target\nover that without backups")
        lines = [Line2D([], [], color="#555555", ls=ls) for ls in ("-", ":")]
        names = ["late work is cancelled", "late work finishes"]
        axes.get_figure().legend(lines, names, loc="outside upper center", ncols=2, frameon=False)


def _draw_world(axes: Axes, found: Found, world: str, colour: str) -> None:
    for late, looks, name in (("cancel", "-", world), ("finish", ":", "")):
        curves = []
        for seconds in by_seed(found, world, late).values():
            relative = time_to_target(seconds)
            most = max(relative)
            shown = {quorum: value for quorum, value in relative.items() if quorum >= 0.8 * most}
            curves.append(sorted((float(most - quorum), value) for quorum, value in shown.items()))
        if curves:
            band(axes, curves, colour, name or "_hidden", ls=looks)


def draw_measured(file: Path, processes: MeasuredFound) -> None:
    """The k-th arrival over the middle one, on real processes."""
    found = relative_arrivals(processes)
    delays = list(dict.fromkeys(delay for delay, _ in found))
    loads = sorted({neighbours for _, neighbours in found})
    with figure_in(file, 2, 2, 6.4) as panels:
        for axes, delay in zip(panels.flat, delays, strict=False):
            for neighbours, colour in zip(loads, ("#000000", "#E69F00"), strict=False):
                curves = [list(enumerate(curve, 1)) for curve in found.get((delay, neighbours), [])]
                if curves:
                    name = f"{neighbours} busy neighbours more" if neighbours else "the machine as it was"
                    band(axes, curves, colour, name, marker="o", ms=3)
                    axes.set_xlabel(f"k-th gradient of {len(curves[0])}")
            axes.set(title="no delays, only computing" if delay == CONTENDING else f"delays: {delay}", ylim=(0, None))
            axes.xaxis.get_major_locator().set_params(integer=True)
        for axes in panels[:, 0]:
            axes.set_ylabel("mean time to the k-th gradient\nover that to the middle one")
        for axes in panels.flat[len(delays) :]:
            axes.set_visible(False)
        outer_legend(panels.flat[: len(delays)])
