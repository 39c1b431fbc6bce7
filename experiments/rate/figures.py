"""Figures and tables of the rate: updates against N and b, and the best b as n grows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.common.bowl import expected_updates, noise_of
from experiments.common.drawing import figure_in, in_words, legend_under, outer_legend, shades
from experiments.common.spread import markdown, spread_of
from experiments.common.trials import Found
from experiments.rate.racing import Arrival, Run
from experiments.rate.results import (
    Kth,
    Law,
    best_backups,
    finals,
    fitted,
    foretold,
    gain_of_backups,
    kth_arrivals,
    updates_by_quorum,
    updates_over_none,
)
from experiments.rate.settings import GRID_NOISE, LATENCY, NOISES, SIZES, TAILS, Timed, Trial

Races = Found[Trial, Run]


def draw_all(folder: Path, found: Races, arrivals: Found[Timed, Arrival]) -> list[Path]:
    """Every figure and table; gives the files."""
    kth = kth_arrivals(arrivals)
    files = [folder / name for name in ("updates.png", "backups.png", "choice.png", "summary.md")]
    _draw_updates(files[0], found)
    _draw_backups(files[1], found, kth)
    _draw_choice(files[2], kth)
    files[3].write_text(_summary(found, kth))
    return files


def _series(found: Races) -> list[tuple[str, float]]:
    """Tasks and noises that were run."""
    return sorted({(trial.task, trial.noise) for trial in found})


# ---------------------------------------------------------------- updates against N


def _draw_updates(file: Path, found: Races) -> None:
    with figure_in(file, 1, 2, 4.6) as (bowl, digits):
        series = _series(found)
        for (task, noise), colour in zip(series, shades(len(series)), strict=True):
            axes = bowl if task == "bowl" else digits
            measured = {n: one for n, one in updates_by_quorum(found, task, noise).items() if math.isfinite(one.mean)}
            if not measured:
                continue
            quorums = list(measured)
            of_noise = f"noise doubles at N = {noise:g}: " if task == "bowl" else ""
            law = fitted({quorum: one.mean for quorum, one in measured.items()})
            axes.errorbar(
                quorums,
                [one.mean for one in measured.values()],
                yerr=[0.0 if math.isnan(one.half_width) else one.half_width for one in measured.values()],
                fmt="o",
                markersize=4,
                capsize=2,
                color=colour,
                label=f"{of_noise}S = {law.least:.3g}, D = {law.doubling:.3g}",
            )
            if task == "bowl":
                exact = [expected_updates(quorum, noise_of(noise)) for quorum in quorums]
                axes.plot(quorums, exact, color=colour, linewidth=1.2)
            axes.plot(
                quorums,
                [law.updates(quorum) for quorum in quorums],
                color=colour,
                linewidth=1.2,
                linestyle=(0, (2, 2)),
            )
        titles = ("noisy bowl (line: exact, dashed: S (1 + D/N))", "digits (dashed: S (1 + D/N))")
        for axes, title in zip((bowl, digits), titles, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xlabel("N: gradients that make an update")
            axes.set_title(title)
            legend_under(axes, 1)
        bowl.set_ylabel("updates to the target")


# ---------------------------------------------------------------- what b does


def _draw_backups(file: Path, found: Races, kth: Kth) -> None:
    """Left, updates do not depend on b; right, what b buys, as n grows."""
    with figure_in(file, 1, 2, 4.4) as (left, right):
        ratios = updates_over_none(found, GRID_NOISE)
        numbers = sorted({backups for _, backups in ratios})
        quorums = sorted({quorum for quorum, _ in ratios})
        for place, (quorum, colour) in enumerate(zip(quorums, shades(len(quorums)), strict=True)):
            left.plot(
                [numbers.index(b) + 0.05 * (place - 4) for n, b in ratios if n == quorum],
                [ratio for (n, _), ratio in ratios.items() if n == quorum],
                "o",
                markersize=4,
                color=colour,
                label=f"N = {quorum}",
            )
        for b in numbers:
            mean = spread_of([ratio for (_, one), ratio in ratios.items() if one == b])
            left.errorbar([numbers.index(b) + 0.3], [mean.mean], [mean.half_width], fmt="_", color="black", capsize=3)
        left.axhline(1.0, color="#777777", linewidth=0.8)
        left.set_ylim(0.88, 1.12)
        left.set_xticks(range(len(numbers)), [str(b) for b in numbers])
        left.set_xlabel("b: backups beside N (black: mean over N, 95 %)")
        left.set_ylabel("updates to the target\nover those without backups")
        left.set_title("updates: b does not count")
        legend_under(left, 4)
        sizes = [size for size in SIZES if (LATENCY, size) in kth]
        for size, colour in zip(sizes, shades(len(sizes)), strict=True):
            gains = gain_of_backups(kth[LATENCY, size], _law(GRID_NOISE).updates)
            right.plot(
                [100 * b / size for b, _ in gains],
                [gain for _, gain in gains],
                marker=".",
                markersize=4,
                linewidth=1.2,
                color=colour,
                label=f"{size} workers",
            )
        right.set_xlim(-0.5, 40)
        right.set_ylim(bottom=0.7)
        right.set_xlabel("backups, % of all workers")
        right.set_ylabel("times as soon as without backups")
        right.set_title(f"time: {in_words(LATENCY)}")
        legend_under(right, 3)


def _quorum(trial: Trial) -> int:
    return trial.quorum


def _law(noise: float) -> Law:
    """(7) with this noise; only ratios are looked at."""
    return Law(1.0, noise)


def _draw_choice(file: Path, kth: Kth) -> None:
    """The best b against n, for several tails and noises."""
    tails = [tail for tail in TAILS if any(latency == tail for latency, _ in kth)]
    noises = (*NOISES, math.inf)
    with figure_in(file, 2, 2, 5.8, sharex=True, sharey=True) as panels:
        for axes, tail in zip(panels.flat, tails, strict=False):
            sizes = [size for size in SIZES if (tail, size) in kth]
            for noise, colour in zip(noises, shades(len(noises)), strict=True):
                choices = [best_backups(kth[tail, size], _effort(noise)) for size in sizes]
                name = "noise dominates" if math.isinf(noise) else f"noise doubles the updates at N = {noise:g}"
                axes.plot(sizes, [one.backups for one in choices], "o-", ms=3, color=colour, label=name)
                lowest, highest = [one.low for one in choices], [one.high for one in choices]
                axes.fill_between(sizes, lowest, highest, color=colour, alpha=0.15, lw=0)
            axes.set_title(in_words(tail))
        for axes in panels[-1]:
            axes.set_xlabel("n: all workers")
        for axes in panels[:, 0]:
            axes.set_ylabel("best number of backups\n(band: within 1 %)")
        panels[0][0].set_ylim(bottom=0)  # of all panels
        outer_legend(panels.flat, 2)


def _effort(noise: float) -> Any:
    return (lambda gradients: 1.0 / gradients) if math.isinf(noise) else _law(noise).updates


# ---------------------------------------------------------------- in words


def _summary(found: Races, kth: Kth) -> str:
    text = "# Rate: updates and seconds to the target\n\nMade by `python -m experiments.rate figures`.\n"
    for task, noise in _series(found):
        text += f"\n## Updates, {task}" + (f", noise doubles at {noise:g} gradients" if noise else "") + "\n\n"
        text += _updates_table(found, task, noise)
    text += "\n## Updates against backups (bowl)\n\n" + _backups_table(found)
    pairs = foretold(found, kth, LATENCY)
    if pairs:
        off = [abs(math.log(product / seconds)) for *_, seconds, product in pairs]
        text += (
            f"\nSeconds as run beside updates without backups × mean seconds to the N-th arrival: {len(pairs)} cells,\n"
            f"off by {100 * sum(off) / len(off):.1f} % on average, {100 * max(off):.1f} % at most.\n"
        )
        ratios = spread_of(list(updates_over_none(found, GRID_NOISE).values()))
        text += f"Updates with backups over those without, mean over all N and b: {ratios.text(3)}.\n"
    return text + "\n## The best number of backups, by (22)\n\n" + _choice_table(kth)


def _updates_table(found: Races, task: str, noise: float) -> str:
    measured = updates_by_quorum(found, task, noise)
    law = fitted({quorum: one.mean for quorum, one in measured.items() if math.isfinite(one.mean)})
    rates = {trial.quorum: finals(rows, 0)[0].lr for trial, rows in found.items() if _is(trial, task, noise)}
    lines = []
    backups = max((b for trial in found if _is(trial, task, noise) for b in trial.numbers_of_backups), default=0)
    beside = updates_by_quorum(found, task, noise, backups)
    for quorum, one in measured.items():
        exact = f"{expected_updates(quorum, noise_of(noise)):.0f}" if task == "bowl" else "–"
        with_backups = [beside[quorum].text(0)] if backups else []
        lines.append([quorum, f"{rates[quorum]:g}", one.text(0), *with_backups, exact, f"{law.updates(quorum):.0f}"])
    header = ["N", "rate chosen", "updates", *([f"with {backups} backups"] if backups else [])]
    table = markdown([*header, "exact, best rate", "S(1 + D/N) fitted"], lines)
    return f"{table}\nFitted: S = {law.least:.1f}, D = {law.doubling:.1f} gradients.\n"


def _is(trial: Trial, task: str, noise: float) -> bool:
    return (trial.task, trial.noise) == (task, noise)


def _backups_table(found: Races) -> str:
    trials = sorted((trial for trial in found if _is(trial, "bowl", GRID_NOISE)), key=_quorum)
    if not trials:
        return "Nothing was run.\n"
    numbers = trials[0].numbers_of_backups
    lines = [
        [trial.quorum, *(spread_of([row.updates for row in finals(found[trial], b)]).text(0) for b in numbers)]
        for trial in trials
    ]
    return markdown(["N", *(f"b = {b}" for b in numbers)], lines)


def _choice_table(kth: Kth) -> str:
    lines = []
    for tail in TAILS:
        for size in SIZES:
            if (tail, size) in kth:
                choices = [best_backups(kth[tail, size], _effort(noise)) for noise in (*NOISES, math.inf)]
                shown = [f"{one.backups} ({one.low}–{one.high}), ×{one.speed_up:.2f}" for one in choices]
                lines.append([f"`{tail}`", size, *shown])
    names = [f"noise doubles at {noise:g}" for noise in NOISES]
    return markdown(["times", "n", *names, "noise dominates"], lines)
