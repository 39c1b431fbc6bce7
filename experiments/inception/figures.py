"""Figures of the study, from its tables of curves and of rounds alone."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.common.curves import Point
from experiments.common.drawing import COLOURS, PALETTE, PUBLISHED, band, figure_in, outer_legend, shades, ticks
from experiments.common.trials import Found
from experiments.inception import results, tables
from experiments.inception.results import Curves
from experiments.inception.settings import (
    AVERAGE_EPOCHS,
    EARLY_QUORUMS,
    FULL_RATES,
    GRID_BACKUPS,
    Length,
    Trial,
    configurations,
    final_accuracy,
)
from experiments.inception.timing import Seconds, Split
from experiments.published import CHEN
from quorate.errors import BadInput

_LINES = {53: "-", 106: "--", 212: ":"}
#: The target of the hours in the figure of the grid.
_HOURS_TO = 0.6


def draw_all(folder: Path, found: Found[Trial, Point], rounds: Found[Split, Seconds]) -> list[Path]:
    """The figures and the summary; gives the files. What was not run has no figure."""
    length = results.length_of(found)
    finals = results.finals(found, length)
    if not finals:
        raise BadInput(f"there are no finished trainings in {str(folder)!r}; run the study first")
    files = [folder / "curves.png", folder / "tuning.png"]
    _draw_curves(files[0], finals, length)
    _draw_rates(files[1], found, length)
    if any(trial.stop for trial in found):
        files.append(folder / "early.png")
        _draw_early(files[-1], found, length)
    if any(results.split(found, quorum, 0, length) for quorum in length.grid):
        files.append(folder / "grid.png")
        _draw_grid(files[-1], found, rounds, length)
    files.append(folder / "summary.md")
    files[-1].write_text(tables.summary(found, rounds, length))
    return files


def _looks(trial: Trial) -> dict[str, str]:
    """The colour is the policy's, the line shows how many workers there are."""
    return {"colour": COLOURS["backup" if trial.method == "sync" else "async"], "ls": _LINES[trial.workers]}


def _placed() -> list[Trial]:
    """In a legend async stands beside sync on as many machines."""
    return sorted(configurations(), key=lambda trial: (trial.workers, trial.method))


def _draw_curves(file: Path, finals: dict[str, Curves], length: Length) -> None:
    with figure_in(file, 1, 2, 4.2, sharey=True) as (over_hours, over_epochs):
        for one in _placed():
            curves = finals.get(one.name)
            if curves:
                hours = [[(point.seconds / 3600, 100 * point.measure) for point in points] for points in curves]
                band(over_hours, hours, name=one.name, **_looks(one))
                band(over_epochs, _over_epochs(curves, length), name=one.name, **_looks(one))
        over_hours.set(xscale="log", xlabel="virtual hours", ylabel="test accuracy, %")
        over_hours.xaxis.set_major_formatter("{x:g}")
        over_epochs.set(xlabel="epochs of samples applied")
        over_epochs.xaxis.get_major_locator().set_params(integer=True)
        outer_legend([over_epochs], 3)


def _over_epochs(curves: Curves, length: Length) -> list[list[tuple[float, float]]]:
    return [[(point.samples / length.train_samples, 100 * point.measure) for point in points] for points in curves]


def _draw_rates(file: Path, found: Found[Trial, Point], length: Length) -> None:
    """The tuning; and async at several rates in full length, where that was run."""
    several = any(len(results.by_rate(found, f"async {workers}", length)) > 1 for workers in FULL_RATES)
    with figure_in(file, 1, 1 + several, 4.0, squeeze=False) as panels:
        tuning, full = panels[0][0], panels[0][-1] if several else None
        for one in _placed():
            looks = _looks(one)
            marks: dict[str, Any] = {"ms": 4, "color": looks["colour"], "ls": looks["ls"], "label": one.name}
            tried = sorted(
                (trial.lr, 100 * final_accuracy(points))
                for trial, points in found.items()
                if trial.is_tuning and trial.name == one.name
            )
            if tried:
                tuning.plot(*zip(*tried, strict=True), "o", **marks)
            ended = {rate: results.accuracy(some) for rate, some in results.by_rate(found, one.name, length).items()}
            if full is not None and one.method == "async" and ended:
                means = [100 * spread.mean for spread in ended.values()]
                full.plot(list(ended), means, "o", **marks)
                for rate, spread in ended.items():
                    full.plot([rate] * 2, [100 * spread.lowest, 100 * spread.highest], color=looks["colour"], lw=1)
        tuning.set(
            title=f"tuning: {length.tuning_epochs} epochs, one seed",
            xscale="log",
            xlabel="initial learning rate",
            ylabel="accuracy on pictures held back, %",
        )
        if full is not None:
            full.set(
                title=f"async: {length.epochs} epochs, three seeds",
                xscale="log",
                xlabel="initial learning rate",
                ylabel="test accuracy, %",
            )
            names = [f"async {workers}" for workers in FULL_RATES]
            ticks(full, "x", sorted({rate for name in names for rate in results.by_rate(found, name, length)}))
        outer_legend([tuning], 3)


def _draw_early(file: Path, found: Found[Trial, Point], length: Length) -> None:
    """With the average of the parameters above, without it below."""
    with figure_in(file, 2, len(EARLY_QUORUMS), 5.6, sharex=True, sharey=True) as panels:
        for column, quorum in enumerate(EARLY_QUORUMS):
            for row, average in enumerate((AVERAGE_EPOCHS, 0.0)):
                axes = panels[row][column]
                by_rate = results.early(found, quorum, average)
                for colour, (rate, curves) in zip(PALETTE, by_rate.items(), strict=False):
                    band(axes, _over_epochs(curves, length), colour, f"rate {rate:g}")
                measured = "average of the parameters" if average else "last parameters"
                axes.set(title=f"N = {quorum}, {measured} measured")
            panels[-1][column].set_xlabel("epochs of samples applied")
        for row in panels:
            row[0].set_ylabel("test accuracy, %")
        outer_legend(panels.flat, 4)


def _draw_grid(file: Path, found: Found[Trial, Point], rounds: Found[Split, Seconds], length: Length) -> None:
    with figure_in(file, 2, 2, 6.2) as ((updates, seconds), (ends, hours)):
        _draw_updates(updates, found, length)
        for colour, quorum in zip(shades(len(length.grid)), length.grid, strict=True):
            timed = {b: results.seconds_a_round(rounds, quorum, b) for b in length.grid_backups}
            line = [(b, spread.mean) for b, spread in timed.items() if spread]
            reached = results.reaching(results.split(found, quorum, min(timed), length), _HOURS_TO)
            for axes, scale in ((seconds, 1.0), (hours, fmean(one.update for one in reached) / 60 if reached else 0.0)):
                if scale and line:
                    here = [(b, scale * value) for b, value in line]
                    axes.plot(*zip(*here, strict=True), "o-", ms=4, color=colour, label=f"N = {quorum}")
        for backups, colour in zip((0, GRID_BACKUPS), PALETTE, strict=False):
            there = [(quorum, results.split(found, quorum, backups, length)) for quorum in length.grid]
            curves = [
                [(quorum, 100 * final_accuracy(some[seed])) for quorum, some in there if some]
                for seed in range(len(length.seeds))
            ]
            if any(curves):
                band(ends, curves, colour, f"b = {backups}", marker="o", ms=4)
        for backups, colour in zip(length.grid_backups[1::2], PALETTE[2:], strict=False):
            largest = max(length.grid)
            some = results.split(found, largest, backups, length)
            if some and backups != GRID_BACKUPS:
                value = 100 * results.accuracy(some).mean
                ends.plot([largest], [value], "D", ms=5, color=colour, label=f"b = {backups}")
        seconds.set(title="seconds a round", xlabel="backups b", ylabel="virtual seconds")
        hours.set(title=f"time to {100 * _HOURS_TO:g} % accuracy", xlabel="backups b", ylabel="virtual minutes")
        ends.set(title=f"accuracy after {length.epochs} epochs", xlabel="quorum N", ylabel="test accuracy, %")
        for axes in (seconds, hours):
            ticks(axes, "x", length.grid_backups)
        ticks(ends, "x", length.grid)
        for axes, columns in ((updates, 3), (seconds, 3), (ends, 4), (hours, 3)):
            _legend_above(axes, columns)


def _draw_updates(axes: Any, found: Found[Trial, Point], length: Length) -> None:
    """Updates to accuracies over quorums, as shares of those of the largest."""
    largest = max(length.grid)
    theirs = {int(n): value for n, value in CHEN["fig5_iterations_thousands"].items()}
    axes.plot(list(theirs), [value / theirs[100] for value in theirs.values()], "s-", ms=4, color=PUBLISHED)
    axes.get_lines()[-1].set_label("published")
    for colour, target in zip(PALETTE, tables.TARGETS, strict=False):
        means = {quorum: results.updates_to(results.split(found, quorum, 0, length), target) for quorum in length.grid}
        if means[largest] == means[largest]:
            shares = [value / means[largest] for value in means.values()]
            axes.plot(list(means), shares, "o-", ms=4, color=colour, label=f"to {100 * target:g} %")
    axes.set(title="updates, as a share of those at N = 100", xlabel="quorum N", ylabel="share")
    axes.set(xscale="log", yscale="log")
    ticks(axes, "x", length.grid)
    ticks(axes, "y", (1, 1.2, 1.4, 1.6, 1.8, 2.0))


def _legend_above(axes: Any, columns: int) -> None:
    """Between a panel and its title."""
    names = axes.get_legend_handles_labels()[1]
    if names:
        axes.set_title(axes.get_title(), pad=6 + 15 * -(-len(names) // columns))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False, fontsize=8.5)
