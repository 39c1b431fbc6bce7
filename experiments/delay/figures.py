"""The study's figures and tables, from its curves alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.drawing import band, figure_in
from experiments.common.trials import Found
from experiments.delay.results import (
    SECONDS,
    Methods,
    Training,
    are_assumed,
    by_method,
    read_iteration_s,
    spread_of,
)
from experiments.delay.rows import Row, Setting
from experiments.delay.settings import DELAYS, NETS, REPAIRED_DELAY, REPAIRS
from experiments.delay.tables import best_of_delay, write_summary
from quorate.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw_all(folder: Path, found: Found[Setting, Row]) -> list[Path]:
    """Every figure and table; gives the files. Seconds of an iteration are the folder's, or else the committed ones."""
    given = folder / SECONDS if (folder / SECONDS).exists() else Path(__file__).parent / "results" / SECONDS
    iteration_s = read_iteration_s(given)
    clock = "seconds, with assumed times of an iteration" if are_assumed(given) else "seconds"
    finals, tuning = by_method(found, tuning=False), by_method(found, tuning=True)
    files = [folder / name for name in ("convergence.png", "repairs.png", "tuning.png")]
    _draw_convergence(files[0], finals, iteration_s, clock)
    _draw_repairs(files[1], finals)
    _draw_tuning(files[2], tuning)
    return [*files, *write_summary(folder, finals, tuning, iteration_s)]


# ---------------------------------------------------------------- accuracy over updates and seconds


def _draw_convergence(file: Path, finals: Methods, iteration_s: dict[tuple[str, int], float], clock: str) -> None:
    with figure_in(file, 2, 2, (8.6, 6.0)) as panels:
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
        figure = panels[0][0].get_figure()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)


def _draw_band(axes: Axes, trainings: list[Training], unit: float, colour: str, name: str) -> None:
    """The mean of the seeds, and from the lowest to the highest. One that diverged only guesses from there on."""
    updates = sorted({row.update for training in trainings for row in training.rows if row.update})
    curves = []
    for training in trainings:
        measured = [(row.update, row.accuracy) for row in training.rows]
        later = [(update, training.accuracy) for update in updates if update > measured[-1][0]]
        curves.append([(update * unit, accuracy) for update, accuracy in [*measured, *later]])
    band(axes, curves, colour, name, linewidth=1.6)


# ---------------------------------------------------------------- what repairs it


def _draw_repairs(file: Path, finals: Methods) -> None:
    with figure_in(file, 1, 2, (8.6, 3.6), sharey=True) as panels:
        for axes, net in zip(panels, NETS, strict=True):
            for repair in REPAIRS:
                trainings = finals.get((net, REPAIRED_DELAY, repair))
                if trainings:
                    few = f" ({len(trainings)} seed{'s' * (len(trainings) > 1)})" if len(trainings) < 3 else ""
                    _draw_band(axes, trainings, 1.0, REPAIR_COLOURS[repair], REPAIR_NAMES[repair] + few)
            without = finals.get((net, 0, "none"))
            if without:
                level = spread_of(without).mean
                axes.axhline(level, color="black", linewidth=0.9, linestyle=(0, (4, 3)))
                axes.annotate("no delay, at its end", (0, level), (4, 3), textcoords="offset points", fontsize=8.5)
            axes.set(xlabel="updates", title=f"{net}, delay {REPAIRED_DELAY}")
            axes.set_ylim(0, 1)
            axes.set_xlim(left=0)
            height = 0.86 if net == "googlenet" else 0.81
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, height), frameon=False, fontsize=8)
        panels[0].set_ylabel("test accuracy")


# ---------------------------------------------------------------- the tuning


def _draw_tuning(file: Path, tuning: Methods) -> None:
    with figure_in(file, 1, 2, (8.6, 3.6), sharey=True) as panels:
        for axes, net in zip(panels, NETS, strict=True):
            for (of_net, delay, repair), trainings in sorted(tuning.items()):
                if of_net != net or repair == "compensation":
                    continue
                plain = repair == "lr"
                colour = COLOURS[delay] if plain else REPAIR_COLOURS[repair]
                name = (f"delay {delay}" if delay else "no delay") + ("" if plain else f", {repair}")
                style = {"linestyle": "-" if plain else ":", "marker": "o", "markersize": 3.5}
                axes.plot(*_rates_and_accuracies(trainings), color=colour, label=name, **style)
            for value, marker in ((64.0, "v"), (1024.0, "^")):
                trainings = tuning.get((net, REPAIRED_DELAY, "compensation"), [])
                axes.plot(
                    *_rates_and_accuracies([one for one in trainings if one.setting.compensation == value]),
                    color=REPAIR_COLOURS["compensation"],
                    linestyle=":",
                    marker=marker,
                    markersize=4,
                    label=f"delay {REPAIRED_DELAY}, compensation λ={value:g}",
                )
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set(xlabel="learning rate / (1 − momentum)", title=net)
            axes.set_ylim(0, 1)
        panels[0].set_ylabel("test accuracy after a short training")
        handles, names = panels[1].get_legend_handles_labels()
        panels[1].get_figure().legend(handles, names, loc="outside right upper", frameon=False, fontsize=8)


def _rates_and_accuracies(trainings: list[Training]) -> tuple[list[float], list[float]]:
    found = sorted((one.setting.lr / (1 - one.setting.momentum), one.accuracy) for one in trainings)
    return [rate for rate, _ in found], [accuracy for _, accuracy in found]
