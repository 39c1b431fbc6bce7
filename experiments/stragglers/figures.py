"""The study's figures, from its tables alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.drawing import band, figure_in
from experiments.stragglers import published
from experiments.stragglers.choosing import Found, by_seed, estimated_hours, time_to_target
from experiments.stragglers.simulated import MEAN
from experiments.stragglers.tables import MeasuredFound, of_world, relative_arrivals
from experiments.stragglers.worlds import MEASURED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PAPER = "#0072B2", "#000000"
TAILS = {
    MEASURED: "#000000",
    "exponential, mild": "#56B4E9",
    "exponential, strong": "#0072B2",
    "lognormal, s = 0.2": "#009E73",
    "lognormal, s = 0.5": "#006B4E",
    "Pareto, α = 4": "#E69F00",
    "Pareto, α = 2.5": "#D55E00",
    "rare pauses, 1 % × 4": "#CC79A7",
}
NO_TAILS = {
    "no tail": "#7F7F7F",
    "one always slow, × 2": "#D55E00",
    "all slow together": "#0072B2",
    "a few slow for a while": "#009E73",
}


def draw_arrivals(file: Path, found: Found) -> None:
    """Left the distribution of the k-th arrival, right its mean; dots are the paper's."""
    import matplotlib as mpl

    runs = list(of_world(found, MEASURED).values())
    machines = max(row.k for row in runs[0])
    shown = [k for k in published.TIME_QUANTILES_S if k <= machines]
    with figure_in(file, 1, 2, (9.0, 3.8)) as (left, right):
        for place, k in enumerate(shown):
            colour = mpl.colormaps["viridis"](0.92 * place / max(1, len(shown) - 1))
            mean = [
                statistics.fmean(row.seconds for rows in runs for row in rows if (row.k, row.level) == (k, str(level)))
                for level in published.LEVELS
            ]
            left.plot(mean, published.LEVELS, color=colour, label=f"k = {k}")
            if machines == published.WORKERS:
                left.plot(published.TIME_QUANTILES_S[k], published.LEVELS, "o", ms=2.5, color=colour)
        left.set(xlabel="seconds until the k-th gradient", ylabel="share of rounds", xlim=(1.2, 4.0), ylim=(0, 1))
        left.legend(loc="lower right", frameon=False, fontsize=8)
        left.set_title("lines: simulated, dots: published")
        means = [[(row.k, row.seconds) for row in rows if row.level == MEAN] for rows in runs]
        band(right, means, OURS, "simulated, mean of seeds")
        if machines == published.WORKERS:
            right.plot(*zip(*published.MEAN_S.items(), strict=True), "o", ms=3.5, color=PAPER, label="published")
        right.set(xlabel="k", ylabel="mean seconds until the k-th gradient", ylim=(1.2, None))
        right.legend(loc="upper left", frameon=False)


def draw_choice(file: Path, found: Found) -> None:
    """Estimated hours by quorum."""
    with figure_in(file, size=(6.0, 3.8)) as axes:
        curves = [list(estimated_hours(one).items()) for one in by_seed(found, MEASURED, "cancel").values()]
        band(axes, curves, OURS, "simulated arrivals × the paper's iterations")
        machines = max(n for n, _ in curves[0])
        if machines == published.WORKERS:
            axes.plot(*zip(*published.HOURS.items(), strict=True), "o", ms=4, color=PAPER, label="published, figure 6")
            axes.set(xlim=(49, 101), ylim=(30, 65))
        mean = {n: statistics.fmean(dict(curve)[n] for curve in curves) for n, _ in curves[0]}
        best = min(mean, key=lambda n: mean[n])
        axes.annotate(
            f"{best}+{machines - best}: {mean[best]:.1f} h",
            (best, mean[best]),
            (-70, -22),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": OURS},
            color=OURS,
        )
        axes.set(xlabel=f"quorum N of {machines} workers", ylabel="estimated hours to convergence")
        axes.legend(loc="upper center", frameon=False)


def draw_tails(file: Path, found: Found) -> None:
    """Time to a target over that of all machines, by backups: tails, and what is none."""
    machines = max(trial.machines for trial in found)
    with figure_in(file, 1, 2, (9.4, 4.6)) as (left, right):
        for axes, worlds, title in ((left, TAILS, "tails"), (right, NO_TAILS, "slowness that is no tail")):
            for world, colour in worlds.items():
                _draw_world(axes, found, world, colour)
            axes.axhline(1.0, color="#999999", lw=0.8, ls=(0, (4, 3)))
            axes.set(xlabel=f"backups b of {machines} machines", title=title, xlim=(0, 0.2 * machines), ylim=(0, 1.3))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        left.set_ylabel("time to a target over that of b = 0")
        right.annotate(
            "lines: late work is cancelled, dots: it finishes", (0.02, 0.96), xycoords="axes fraction", fontsize=8
        )


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
    colours = dict(zip(loads, ("#0072B2", "#D55E00", "#009E73"), strict=False))
    with figure_in(file, 1, len(delays), (3.0 * len(delays) + 0.6, 3.4)) as panels:
        panels_list: list[Any] = list(panels) if len(delays) > 1 else [panels]
        for axes, delay in zip(panels_list, delays, strict=True):
            for neighbours in loads:
                curves = found.get((delay, neighbours))
                if curves:
                    points = [list(enumerate(curve, 1)) for curve in curves]
                    name = f"{neighbours} busy neighbours more" if neighbours else "the machine as it was"
                    band(
                        axes,
                        [[(float(k), y) for k, y in curve] for curve in points],
                        colours[neighbours],
                        name,
                        marker="o",
                        ms=3,
                    )
            axes.set(xlabel="k", title=f"delays: {delay}", ylim=(0, None))
            axes.xaxis.get_major_locator().set_params(integer=True)
        panels_list[0].set_ylabel("mean time to the k-th gradient\nover that to the middle one")
        panels_list[-1].legend(frameon=False, loc="upper left")
