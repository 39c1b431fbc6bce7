"""Figures and tables of the contest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.common.drawing import COLOURS, figure_in
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.to_target import TUNING_SEED, Finish, finals
from experiments.common.trials import Found
from experiments.contest.settings import BUDGET_S, BY_NAME, LATENCIES, TARGET, Trial

Races = Found[Trial, Finish]


def draw_all(folder: Path, found: Races) -> list[Path]:
    """Every figure and table; gives the files."""
    files = [folder / name for name in ("contest.png", "tuning.png", "summary.md")]
    _draw_contest(files[0], found)
    _draw_tuning(files[1], found)
    files[2].write_text(_summary(found))
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
    clusters, methods = _clusters(found), _methods(found)
    sizes = sorted({machines for machines, _ in clusters})
    columns = max(sum(machines == size for machines, _ in clusters) for size in sizes)
    shape = (2.9 * columns + 1.6, (0.23 * len(methods) + 0.7) * len(sizes) + 0.4)
    with figure_in(file, len(sizes), columns, size=shape) as made:
        panels = _flat(made)
        for place, (machines, latency) in enumerate(clusters):
            axes = panels[place]
            for row, method in enumerate(methods):
                trial = Trial(machines, latency, method)
                if trial in found:
                    _dots(axes, row, [one.seconds for one in finals(found[trial])], COLOURS[BY_NAME[method].family])
            axes.set_ylim(len(methods) - 0.5, -0.5)
            axes.set_yticks(range(len(methods)), methods if place % columns == 0 else [""] * len(methods), fontsize=8)
            axes.set_xlim(0, BUDGET_S * 1.08)
            axes.set_title(f"{machines} machines, {latency}", loc="left", fontsize=9.5)
            if place // columns == len(sizes) - 1:
                axes.set_xlabel(f"virtual seconds to {TARGET:.0%}")


def _flat(made: Any) -> list[Any]:
    return [made] if not hasattr(made, "ravel") else list(made.ravel())


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
    clusters = [one for one in _clusters(found) if one[0] == max(machines for machines, _ in _clusters(found))]
    with figure_in(file, 1, len(clusters), size=(3.4 * len(clusters) + 1.6, 4.2)) as made:
        panels = _flat(made)
        for axes, (machines, latency) in zip(panels, clusters, strict=True):
            seen: dict[str, int] = {}
            for method in _methods(found):
                trial = Trial(machines, latency, method)
                if trial not in found:
                    continue
                family = BY_NAME[method].family
                again = seen[family] = seen.get(family, -1) + 1
                tried = sorted((row.lr, row.seconds) for row in found[trial] if row.seed == TUNING_SEED)
                axes.plot(
                    [lr for lr, _ in tried],
                    [min(seconds, 1.03 * BUDGET_S) for _, seconds in tried],
                    marker="ovs^Dxp"[again % 7],
                    markersize=4,
                    linewidth=0.8,
                    color=COLOURS[family],
                    label=method if axes is panels[-1] else None,
                )
            axes.set_xscale("log")
            axes.set_ylim(0, 1.06 * BUDGET_S)
            axes.set_xlabel("learning rate")
            axes.set_title(f"{machines} machines, {latency}", loc="left", fontsize=9.5)
        panels[0].set_ylabel(f"virtual seconds to {TARGET:.0%}, tuning seed (top: never)")
        panels[-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


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
