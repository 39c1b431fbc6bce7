"""The study's figures and tables, from its curves alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.drawing import COLOURS, REPAIR_COLOURS, band, figure_in, outer_legend
from experiments.common.trials import Found
from experiments.delay.held_out import CIFAR, DATA_SETS, Trial
from experiments.delay.held_out_tables import accuracies, chosen_repair, of_data, plan, times
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

#: Without delay it is full sync, which has its colour; with it the greys of Delayed, and lines that print keeps apart.
LOOKS: dict[int, dict[str, Any]] = {
    0: {"colour": COLOURS["full-sync"], "ls": "-"},
    1: {"colour": COLOURS["delayed"], "ls": "-"},
    2: {"colour": "#5A5A5A", "ls": (0, (5, 1.5))},
    4: {"colour": "#9A9A9A", "ls": (0, (1.5, 1))},
}
OF_REPAIRS = {
    "none": REPAIR_COLOURS["none"],
    "lr": REPAIR_COLOURS["own rate"],
    "warm-up": REPAIR_COLOURS["warm-up and own rate"],
    "momentum": REPAIR_COLOURS["momentum"],
    "compensation": REPAIR_COLOURS["compensation"],
}
REPAIR_NAMES = {
    "none": "none: the rate of delay 0",
    "lr": "a rate of its own",
    "warm-up": "its own rate, delay warms up",
    "momentum": "its own rate, momentum 0.5",
    "compensation": "its own rate, compensation",
}


def draw_all(folder: Path, found: Found[Setting, Row], held: Found[Trial, Row]) -> list[Path]:
    """Every figure and table of both protocols; gives the files.

    Seconds of an iteration are the folder's, or else the committed ones.
    """
    given = folder / SECONDS if (folder / SECONDS).exists() else Path(__file__).parent / "results" / SECONDS
    iteration_s = read_iteration_s(given)
    clock = "seconds, with assumed times of an iteration" if are_assumed(given) else "seconds"
    finals, tuning = by_method(found, tuning=False), by_method(found, tuning=True)
    files = [folder / name for name in ("convergence.png", "repairs.png", "tuning.png")]
    _draw_convergence(files[0], finals, iteration_s, clock)
    _draw_repairs(files[1], finals)
    _draw_tuning(files[2], tuning)
    files += write_summary(folder, finals, tuning, iteration_s)
    if not held:
        return files
    _draw_held_out(folder / "held-out.png", held)
    tables = (accuracies(held), times(held, iteration_s), plan(held))
    (folder / "held-out.md").write_text("\n".join(tables))
    return [*files, folder / "held-out.png", folder / "held-out.md"]


# ---------------------------------------------------------------- accuracy over updates and seconds


def _draw_convergence(file: Path, finals: Methods, iteration_s: dict[tuple[str, int], float], clock: str) -> None:
    with figure_in(file, 2, 2, 5.8, sharey=True) as panels:
        for axes_of_net, net in zip(panels, NETS, strict=True):
            for delay in DELAYS:
                repair = best_of_delay(finals, net, delay)
                if repair is None:
                    continue
                if (net, delay) not in iteration_s:
                    raise BadInput(
                        f"the seconds of an iteration of {net} at delay {delay} are missing; add a line for them"
                    )
                for axes, unit in zip(axes_of_net, (1.0, iteration_s[net, delay]), strict=True):
                    _draw_band(axes, finals[net, delay, repair], unit, name=_name(delay), **LOOKS[delay])
            over_updates, over_seconds = axes_of_net
            over_updates.set(xlabel="updates", ylabel=f"{net}: test accuracy, %")
            over_seconds.set(xlabel=clock)
            for axes in axes_of_net:
                axes.set_ylim(0, 100)
                axes.set_xlim(left=0)
        outer_legend(panels.flat)


def _name(delay: int) -> str:
    return f"delay {delay}" if delay else "no delay"


def _draw_band(axes: Axes, trainings: list[Training], unit: float, colour: str, name: str, **looks: Any) -> None:
    """The mean of the seeds, and from the lowest to the highest. One that diverged only guesses from there on."""
    updates = sorted({row.update for training in trainings for row in training.rows if row.update})
    curves = []
    for training in trainings:
        measured = [(row.update, row.accuracy) for row in training.rows]
        later = [(update, training.accuracy) for update in updates if update > measured[-1][0]]
        curves.append([(update * unit, 100 * accuracy) for update, accuracy in [*measured, *later]])
    band(axes, curves, colour, name, **looks)


def _draw_held_out(file: Path, found: Found[Trial, Row]) -> None:
    """The second protocol's accuracy over updates, of each delay the method that held-out pictures chose."""
    with figure_in(file, len(DATA_SETS), len(NETS), 5.8) as panels:
        for row, data in zip(panels, DATA_SETS, strict=True):
            finals = of_data(found, data)
            for axes, net in zip(row, NETS, strict=True):
                for delay in DELAYS:
                    repair = chosen_repair(found, data, net, delay)
                    if repair is not None:
                        _draw_band(axes, finals[net, delay, repair], 1.0, name=_name(delay), **LOOKS[delay])
                axes.set(xlabel="updates", ylabel=f"{data}, {net}:\ntest accuracy, %")
                axes.set_xlim(left=0)
                axes.set_ylim(0, 100 if data == CIFAR else None)
        outer_legend(panels.flat)


# ---------------------------------------------------------------- what repairs it


def _draw_repairs(file: Path, finals: Methods) -> None:
    with figure_in(file, 1, 2, sharey=True) as panels:
        for axes, net in zip(panels, NETS, strict=True):
            for repair in REPAIRS:
                trainings = finals.get((net, REPAIRED_DELAY, repair))
                if trainings:
                    _draw_band(axes, trainings, 1.0, OF_REPAIRS[repair], REPAIR_NAMES[repair])
            without = finals.get((net, 0, "none"))
            if without:
                axes.axhline(
                    100 * spread_of(without).mean, color=LOOKS[0]["colour"], ls="--", label="no delay, at its end"
                )
            axes.set(xlabel="updates", title=f"{net}, delay {REPAIRED_DELAY}")
            axes.set_ylim(0, 100)
            axes.set_xlim(left=0)
        panels[0].set_ylabel("test accuracy, %")
        outer_legend(panels, 3)


# ---------------------------------------------------------------- the tuning


def _draw_tuning(file: Path, tuning: Methods) -> None:
    """The upper row has the delays, the lower one the repairs of the longest."""
    with figure_in(file, 2, 2, 6.6, sharex="col", sharey="row") as panels:
        for axes, net in zip(panels[0], NETS, strict=True):
            for delay in DELAYS:
                _draw_tried(axes, tuning.get((net, delay, "lr"), []), _name(delay), **LOOKS[delay])
            axes.set_title(net)
        for axes, net in zip(panels[1], NETS, strict=True):
            for repair in REPAIRS:
                trainings = tuning.get((net, REPAIRED_DELAY, repair), [])
                for value in sorted({one.setting.compensation for one in trainings}):
                    name = REPAIR_NAMES[repair] + (f", λ = {value:g}" if value else "")
                    ls = "--" if value > 64 else "-"
                    _draw_tried(
                        axes,
                        [one for one in trainings if one.setting.compensation == value],
                        name,
                        OF_REPAIRS[repair],
                        ls,
                    )
            axes.set_xlabel("learning rate / (1 − momentum)")
        for axes, what in zip(panels[:, 0], ("by delay", f"repairs of delay {REPAIRED_DELAY}"), strict=True):
            axes.set_ylabel(f"{what}: test accuracy\nafter a short training, %")
            axes.set_ylim(bottom=0)  # of the row
        outer_legend(panels[0])
        outer_legend(panels[1], 2, "lower")


def _draw_tried(axes: Axes, trainings: list[Training], name: str, colour: str, ls: Any) -> None:
    if trainings:
        axes.plot(*_rates_and_accuracies(trainings), "o", ms=3.5, color=colour, ls=ls, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")


def _rates_and_accuracies(trainings: list[Training]) -> tuple[list[float], list[float]]:
    found = sorted((one.setting.lr / (1 - one.setting.momentum), 100 * one.accuracy) for one in trainings)
    return [rate for rate, _ in found], [accuracy for _, accuracy in found]
