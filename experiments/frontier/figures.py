"""The map, and the table behind it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.common.drawing import COLOURS, figure_in, outer_legend
from experiments.common.spread import markdown
from experiments.common.to_target import Finish
from experiments.common.trials import Found
from experiments.frontier.results import Cell, Standing, async_over_sync, cells_of, standings, verdict
from experiments.frontier.settings import FAMILIES, NOISES, WORKERS, Trial

#: Noise is named after the gradients an update at which it doubles the updates.
_NOISE_NAMES = {
    noise: f"{name} noise (doubles at {noise:g})"
    for noise, name in zip(NOISES, ("little", "middling", "much"), strict=True)
}


def draw_all(folder: Path, found: Found[Trial, Finish]) -> list[Path]:
    """Every figure and table; gives the files."""
    placed = {cell: standings(found, cell) for task in ("bowl", "digits") for cell in cells_of(found, task)}
    placed = {cell: each for cell, each in placed.items() if len(each) == len(FAMILIES)}
    files = [folder / "map.png", folder / "times.png", folder / "summary.md"]
    bowl = {cell: each for cell, each in placed.items() if cell[0] == "bowl"}
    _draw_map(files[0], bowl)
    _draw_times(files[1], bowl)
    files[2].write_text(_summary(placed))
    return files


def _noises(placed: dict[Cell, Any]) -> list[float]:
    return sorted({cell[3] for cell in placed})


# ---------------------------------------------------------------- the map


def _draw_map(file: Path, placed: dict[Cell, dict[str, Standing]]) -> None:
    noises = _noises(placed)
    tails, spreads = sorted({cell[1] for cell in placed}), sorted({cell[2] for cell in placed})
    with figure_in(file, len(noises), 2, 2.3 * len(noises) + 0.6, squeeze=False) as panels:
        for row, noise in enumerate(noises):
            for column, paint in enumerate((_paint_winner, _paint_ratio)):
                axes = panels[row][column]
                for (_, tail, spread, one), each in placed.items():
                    if one == noise:
                        paint(axes, tails.index(tail), spreads.index(spread), each)
                _label(axes, tails, spreads)
            panels[row][0].set_ylabel(f"{_NOISE_NAMES[noise]}\nslowest worker over fastest")
        panels[0][0].set_title("who is first")
        panels[0][1].set_title("async beside the best synchronous policy")
        for axes in panels[-1]:
            axes.set_xlabel("tail of a worker's times (lognormal σ)")


def _label(axes: Any, tails: list[float], spreads: list[float]) -> None:
    axes.set_xlim(-0.5, len(tails) - 0.5)
    axes.set_ylim(-0.5, len(spreads) - 0.5)
    axes.set_xticks(range(len(tails)), [f"{tail:g}" for tail in tails])
    axes.set_yticks(range(len(spreads)), [f"{spread:g}×" for spread in spreads])
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _square(axes: Any, x: int, y: int, colour: Any, alpha: float, text: str, text_colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, facecolor=colour, alpha=alpha, linewidth=0))
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=text_colour, linespacing=1.35)


def _paint_winner(axes: Any, x: int, y: int, placed: dict[str, Standing]) -> None:
    found = verdict(placed)
    by = "≈" if not found.is_clear else "×"
    text = f"{found.winner.label}\n{by}{found.ratio:.2f} before\n{found.second.label}"
    strong = found.is_clear
    _square(axes, x, y, COLOURS[found.winner.family], 0.95 if strong else 0.35, text, "white" if strong else "black")


def _paint_ratio(axes: Any, x: int, y: int, placed: dict[str, Standing]) -> None:
    import matplotlib as mpl

    ratio = async_over_sync(placed)
    strength = max(-1.0, min(1.0, math.log2(ratio) / 2)) if ratio > 0 and math.isfinite(ratio) else 0.0
    colour = mpl.colormaps["BrBG"](0.5 + 0.45 * strength)
    text = f"{ratio:.2f}×\nas soon" if ratio >= 1 else f"{1 / ratio:.2f}×\nlater"
    _square(axes, x, y, colour, 1.0, text, "white" if abs(strength) > 0.6 else "black")


# ---------------------------------------------------------------- times


def _draw_times(file: Path, placed: dict[Cell, dict[str, Standing]]) -> None:
    """Times relative to full sync, over the tail; a row for each unevenness, a column for each noise."""
    noises, spreads = _noises(placed), sorted({cell[2] for cell in placed}, reverse=True)
    looks = {"squeeze": False, "sharex": True, "sharey": True}
    with figure_in(file, len(spreads), len(noises), 2.0 * len(spreads) + 0.9, **looks) as panels:
        for row, spread in enumerate(spreads):
            for axes, noise in zip(panels[row], noises, strict=True):
                cells = sorted(cell for cell in placed if cell[2:] == (spread, noise))
                for family in FAMILIES:
                    shown = [
                        (cell[1], placed[cell]["full-sync"].seconds.mean / placed[cell][family].seconds.mean)
                        for cell in cells
                    ]
                    axes.plot(*zip(*shown, strict=True), "o-", ms=3.5, color=COLOURS[family], label=family)
                axes.set_yscale("log", base=2)
                axes.yaxis.set_major_formatter("{x:g}×")
                axes.set_xticks(sorted({cell[1] for cell in placed}))
            slowest = "workers alike" if spread == 1 else f"slowest takes {spread:g}×"
            panels[row][0].set_ylabel(f"{slowest}\ntimes as soon as full sync")
        for top, bottom, noise in zip(panels[0], panels[-1], noises, strict=True):
            top.set_title(_NOISE_NAMES[noise])
            bottom.set_xlabel("tail (lognormal σ)")
        outer_legend(panels.flat)


# ---------------------------------------------------------------- in words


def _summary(placed: dict[Cell, dict[str, Standing]]) -> str:
    text = (
        f"# When async wins: {WORKERS} workers, virtual seconds to the target, mean ± 95 % interval\n\n"
        "Made by `python -m experiments.frontier figures`. In brackets the option chosen: backups, or arrivals an\n"
        "update. Bold: the first, where none of its seeds overlaps with the next.\n"
    )
    for task in ("bowl", "digits"):
        cells = [cell for cell in placed if cell[0] == task]
        if not cells:
            continue
        text += f"\n## {task}\n\n" + markdown(
            ["noise", "slowest/fastest", "tail", *FAMILIES, "first", "by", "async over best sync"],
            [_line(cell, placed[cell]) for cell in cells],
        )
    return text


def _line(cell: Cell, placed: dict[str, Standing]) -> list[str]:
    _, tail, spread, noise = cell
    found = verdict(placed)
    times = []
    for family in FAMILIES:
        one = placed[family]
        chosen = f" ({one.option})" if family in ("backup", "softsync") else ""
        times.append(f"{one.seconds.text(1)}{chosen}" if math.isfinite(one.seconds.mean) else "never")
    first = f"**{found.winner.label}**" if found.is_clear else found.winner.label
    shown_noise = f"{noise:g}" if noise else "its own"
    ratios = [f"{found.ratio:.2f}", f"{async_over_sync(placed):.2f}"]
    return [shown_noise, f"{spread:g}", f"{tail:g}", *times, first, *ratios]
