"""Figures and tables of the contest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.common.drawing import COLOURS, Tuning, figure_in, in_words, rate_grids
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.to_target import TUNING_SEED, Finish, finals
from experiments.common.trials import Found
from experiments.contest import shared_results
from experiments.contest.settings import BUDGET_S, BY_NAME, LATENCIES, TARGET, Trial
from experiments.contest.shared import Shared

Races = Found[Trial, Finish]


def draw_all(folder: Path, found: Races, shared: Found[Shared, Finish]) -> list[Path]:
    """Every figure and table; gives the files."""
    files = [folder / name for name in ("contest.png", "tuning.png", "shared.png", "summary.md")]
    _draw_contest(files[0], found)
    _draw_tuning(files[1], found)
    shared_results.draw(files[2], shared)
    files[3].write_text(_summary(found) + shared_results.summary(shared))
    return files


def _clusters(found: Races) -> list[tuple[int, str]]:
    """Machines and latency, in the order of the settings."""
    return sorted(
        {(one.machines, one.latency) for one in found}, key=lambda one: (one[0], list(LATENCIES).index(one[1]))
    )


def _methods(found: Races) -> list[str]:
    there = {trial.method for trial in found}
    return [name for name in BY_NAME if name in there]


def _seconds(found: Races, trial: Trial) -> Spread:
    return spread_of([row.seconds for row in finals(found[trial])])


# ---------------------------------------------------------------- figures


def _draw_contest(file: Path, found: Races) -> None:
    """Seconds to the target of every seed, a row for each method."""
    from matplotlib.lines import Line2D

    clusters, methods = _clusters(found), _methods(found)
    sizes = sorted({machines for machines, _ in clusters})
    columns = max(sum(machines == size for machines, _ in clusters) for size in sizes)
    height = (0.21 * len(methods) + 0.6) * len(sizes) + 0.6
    with figure_in(file, len(sizes), columns, height, squeeze=False, sharex=True, sharey=True) as panels:
        for axes, (machines, latency) in zip(panels.flat, clusters, strict=True):
            for row, method in enumerate(methods):
                trial = Trial(machines, latency, method)
                if trial in found:
                    _dots(axes, row, [one.seconds for one in finals(found[trial])], COLOURS[BY_NAME[method].family])
            axes.set_ylim(len(methods) - 0.5, -0.5)
            axes.set_yticks(range(len(methods)), methods, fontsize=8.5)
            axes.set_xlim(0, BUDGET_S * 1.08)
            axes.set_title(_title(machines, latency))
        figure = axes.get_figure()
        figure.supxlabel(f"virtual seconds to {TARGET:.0%} accuracy", fontsize=9.5)
        marks = {
            "a seed": Line2D([], [], ls="", marker="o", ms=4, color="#555555"),
            "mean of all seeds": Line2D([], [], ls="", marker="|", ms=9, mew=1.6, color="#555555"),
            f"some seeds were not there in {BUDGET_S:g} s": Line2D([], [], ls="", marker="x", color="#555555"),
        }
        figure.legend(marks.values(), marks, loc="outside upper center", ncols=len(marks), frameon=False)


def _title(machines: int, latency: str) -> str:
    return f"{machines} machines\n{in_words(LATENCIES[latency])}"


def _dots(axes: Any, row: int, seconds: list[float], colour: str) -> None:
    """Seeds as dots, their mean as a line; a cross at the end of the time for one that never came there."""
    there = [one for one in seconds if math.isfinite(one)]
    axes.plot(there, [row] * len(there), "o", markersize=4, color=colour, alpha=0.75)
    never = len(seconds) - len(there)
    if never:
        axes.plot([BUDGET_S * 1.03], [row], "x", markersize=6, color=colour, clip_on=False)
    else:
        mean = sum(there) / len(there)
        axes.plot([mean, mean], [row - 0.32, row + 0.32], "-", linewidth=1.6, color=colour)


def _draw_tuning(file: Path, found: Races) -> None:
    """Every rate that was tried on the largest cluster of each kind."""
    largest = max(machines for machines, _ in _clusters(found))
    clusters = [one for one in _clusters(found) if one[0] == largest]
    methods = _methods(found)
    tunings = [[_tuning(found, Trial(*one, method)) for method in methods] for one in clusters]
    with figure_in(file, 1, len(clusters), 0.24 * len(methods) + 1.4, squeeze=False, sharex=True, sharey=True) as made:
        rate_grids(made[0], tunings, f"virtual seconds to {TARGET:.0%} accuracy, one seed")
        for axes, one in zip(made[0], clusters, strict=True):
            axes.set_title(_title(*one))
        note = f"ring: chosen by accuracy, cross: not at {TARGET:.0%} in {BUDGET_S:g} s"
        axes.get_figure().supxlabel(f"learning rate ({note})", fontsize=9.5)


def _tuning(found: Races, trial: Trial) -> Tuning:
    rows = found.get(trial, [])
    tried = [(row.lr, row.seconds if math.isfinite(row.seconds) else None) for row in rows if row.seed == TUNING_SEED]
    return Tuning(trial.method, tried, finals(rows)[0].lr if rows else None)


# ---------------------------------------------------------------- in words


def _summary(found: Races) -> str:
    text = (
        f"# Contest: digits, {BUDGET_S:g} virtual seconds each, mean ± 95 % interval over seeds\n\n"
        "Made by `python -m experiments.contest figures`. Updates and samples to the target; accuracy is the\n"
        "mean over the second half of the time, by which rates were chosen.\n"
    )
    for machines, latency in _clusters(found):
        there = [Trial(machines, latency, method) for method in _methods(found)]
        there = [trial for trial in there if trial in found]
        there.sort(key=lambda trial: (_seconds(found, trial).mean, -_last(found, trial).mean))
        text += f"\n## {machines} machines, {latency} (`{LATENCIES[latency]}`)\n\n"
        text += markdown(
            [
                "method",
                "rate",
                f"seconds to {TARGET:.0%}",
                "updates",
                "1000 samples",
                "accuracy, %",
                "dropped",
                "staleness",
            ],
            [_line(found, trial) for trial in there],
        )
    return text


def _last(found: Races, trial: Trial) -> Spread:
    return spread_of([0.1 if math.isnan(row.measure) else row.measure for row in finals(found[trial])])


def _line(found: Races, trial: Trial) -> list[str]:
    rows = finals(found[trial])
    seconds = _seconds(found, trial)
    reached = sum(math.isfinite(row.seconds) for row in rows)
    shown = seconds.text(1) if reached == len(rows) else f"{reached} of {len(rows)} got there"
    means = [spread_of(values) for values in zip(*((row.updates, row.samples / 1000) for row in rows), strict=True)]
    counts = [
        f"{one.mean:.{digits}f}" if math.isfinite(one.mean) else "–" for one, digits in zip(means, (0, 1), strict=True)
    ]
    drop = spread_of([row.drop_rate for row in rows]).mean
    staleness = spread_of([row.staleness for row in rows]).mean
    last = _last(found, trial).text(1, 100)
    return [trial.method, f"{rows[0].lr:g}", shown, *counts, last, f"{drop:.0%}", f"{staleness:.1f}"]
