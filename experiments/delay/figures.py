"""The study's figures and tables, from its curves alone. matplotlib is imported only here, and opens no window."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.delay.results import SECONDS, are_assumed, by_method, final_accuracy, read_curves, read_iteration_s
from experiments.delay.settings import DELAYS, NETS, REPAIRED_DELAY, REPAIRS
from experiments.delay.tables import best_of_delay, write_summary
from experiments.delay.training import Row
from quorate.errors import BadInput
from quorate.reporting.figures import STYLE, check_can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Dark to light with the delay, so that print without colours keeps the order.
COLOURS = {0: "#000000", 1: "#0072B2", 2: "#D55E00", 4: "#CC79A7"}
REPAIR_COLOURS = {
    "none": "#7F7F7F",
    "lr": "#CC79A7",
    "warm-up": "#0072B2",
    "momentum": "#009E73",
    "compensation": "#E69F00",
}
REPAIR_NAMES = {
    "none": "none: the rate of delay 0",
    "lr": "a rate of its own",
    "warm-up": "its own rate, delay warms up",
    "momentum": "its own rate, momentum 0.5",
    "compensation": "its own rate, compensation",
}

Methods = dict[tuple[str, int, str], list[list[Row]]]


def draw_all(folder: Path, seconds: Path | None = None) -> list[Path]:
    """Every figure and table of the curves in a folder; gives the files that were written."""
    check_can_draw()
    rows = read_curves(folder)
    if not rows:
        raise BadInput(f"there are no curves in {str(folder)!r}; run the study first: python -m experiments.delay run")
    given = seconds or (
        folder / SECONDS if (folder / SECONDS).exists() else Path(__file__).parent / "results" / SECONDS
    )
    iteration_s = read_iteration_s(given)
    clock = "seconds, with assumed times of an iteration" if are_assumed(given) else "seconds"
    finals, tuning = by_method(rows, tuning=False), by_method(rows, tuning=True)
    drawn = [
        (folder / "convergence.png", _draw_convergence(finals, iteration_s, clock)),
        (folder / "repairs.png", _draw_repairs(finals)),
        (folder / "tuning.png", _draw_tuning(tuning)),
    ]
    for file, figure in drawn:
        figure.savefig(file)
    return [*(file for file, _ in drawn), *write_summary(folder, finals, tuning, iteration_s)]


# ---------------------------------------------------------------- accuracy over updates and seconds


def _draw_convergence(finals: Methods, iteration_s: dict[tuple[str, int], float], clock: str) -> Figure:
    figure, panels = _new_figure(2, 2, (8.6, 6.0))
    for axes_of_net, net in zip(panels, NETS, strict=True):
        for delay in DELAYS:
            repair = best_of_delay(finals, net, delay)
            if repair is None:
                continue
            if (net, delay) not in iteration_s:
                raise BadInput(
                    f"the seconds of an iteration of {net} at delay {delay} are missing; add a line for them"
                )
            name = f"delay {delay}" if delay else "no delay"
            for axes, unit in zip(axes_of_net, (1.0, iteration_s[net, delay]), strict=True):
                _draw_band(axes, finals[net, delay, repair], unit, COLOURS[delay], name)
        over_updates, over_seconds = axes_of_net
        over_updates.set(xlabel="updates", ylabel=f"test accuracy, {net}")
        over_seconds.set(xlabel=clock)
        for axes in axes_of_net:
            axes.set_ylim(0, 1)
            axes.set_xlim(left=0)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    return figure


def _draw_band(axes: Axes, trainings: list[list[Row]], unit: float, colour: str, name: str) -> None:
    """The mean of the seeds, and from the lowest to the highest."""
    points = list(_points(trainings))
    xs = [update * unit for update, _ in points]
    means = [statistics.mean(values) for _, values in points]
    axes.plot(xs, means, color=colour, label=name, linewidth=1.6)
    axes.fill_between(
        xs, [min(v) for _, v in points], [max(v) for _, v in points], color=colour, alpha=0.18, linewidth=0
    )


def _points(trainings: list[list[Row]]) -> Iterator[tuple[int, list[float]]]:
    """Updates and the accuracies of all seeds there. One that diverged only guesses from there on."""
    updates = sorted({row.update for rows in trainings for row in rows})
    for update in updates:
        values = []
        for rows in trainings:
            there = [row.accuracy for row in rows if row.update == update]
            if there:
                values.append(there[0])
            elif rows[-1].diverged and rows[-1].update < update:
                values.append(final_accuracy(rows))
        yield update, values


# ---------------------------------------------------------------- what repairs it


def _draw_repairs(finals: Methods) -> Figure:
    figure, panels = _new_figure(1, 2, (8.6, 3.6), sharey=True)
    for axes, net in zip(panels[0], NETS, strict=True):
        for repair in REPAIRS:
            trainings = finals.get((net, REPAIRED_DELAY, repair))
            if trainings:
                few = f" ({len(trainings)} seed{'s' * (len(trainings) > 1)})" if len(trainings) < 3 else ""
                _draw_band(axes, trainings, 1.0, REPAIR_COLOURS[repair], REPAIR_NAMES[repair] + few)
        without = finals.get((net, 0, "none"))
        if without:
            level = statistics.mean(final_accuracy(rows) for rows in without)
            axes.axhline(level, color="black", linewidth=0.9, linestyle=(0, (4, 3)))
            axes.annotate("no delay, at its end", (0, level), (4, 3), textcoords="offset points", fontsize=8.5)
        axes.set(xlabel="updates", title=f"{net}, delay {REPAIRED_DELAY}")
        axes.set_ylim(0, 1)
        axes.set_xlim(left=0)
        axes.legend(
            loc="upper left", bbox_to_anchor=(0.0, 0.86 if net == "googlenet" else 0.81), frameon=False, fontsize=8
        )
    panels[0][0].set_ylabel("test accuracy")
    return figure


# ---------------------------------------------------------------- the tuning


def _draw_tuning(tuning: Methods) -> Figure:
    figure, panels = _new_figure(1, 2, (8.6, 3.6), sharey=True)
    for axes, net in zip(panels[0], NETS, strict=True):
        for (of_net, delay, repair), trainings in sorted(tuning.items()):
            if of_net != net or repair == "compensation":
                continue
            found = sorted((rows[0].lr / (1 - rows[0].momentum), final_accuracy(rows)) for rows in trainings)
            plain = repair == "lr"
            axes.plot(
                [rate for rate, _ in found],
                [accuracy for _, accuracy in found],
                color=COLOURS[delay] if plain else REPAIR_COLOURS[repair],
                linestyle="-" if plain else ":",
                marker="o",
                markersize=3.5,
                label=(f"delay {delay}" if delay else "no delay") + ("" if plain else f", {repair}"),
            )
        for value, marker in ((64.0, "v"), (1024.0, "^")):
            found = sorted(
                (rows[0].lr / (1 - rows[0].momentum), final_accuracy(rows))
                for rows in tuning.get((net, REPAIRED_DELAY, "compensation"), [])
                if rows[0].compensation == value
            )
            label = f"delay {REPAIRED_DELAY}, compensation λ={value:g}"
            colour = REPAIR_COLOURS["compensation"]
            axes.plot(*zip(*found, strict=True), color=colour, linestyle=":", marker=marker, markersize=4, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="learning rate / (1 − momentum)", title=net)
        axes.set_ylim(0, 1)
    panels[0][0].set_ylabel("test accuracy after a short training")
    handles, names = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _new_figure(
    rows: int, columns: int, size_inches: tuple[float, float], sharey: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size_inches, dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    return figure, [list(line) for line in panels]
