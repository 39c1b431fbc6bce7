"""The map, and the table behind it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.common.drawing import COLOURS, figure_in
from experiments.common.spread import markdown
from experiments.common.to_target import Finish
from experiments.common.trials import Found
from experiments.frontier.results import Cell, Standing, async_over_sync, cells_of, standings, verdict
from experiments.frontier.settings import FAMILIES, WORKERS, Trial


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
    with figure_in(file, 2, len(noises), size=(3.9 * len(noises) + 0.6, 6.4)) as made:
        rows = made if len(noises) > 1 else [[one] for one in made]
        for column, noise in enumerate(noises):
            for row, paint in enumerate((_paint_winner, _paint_ratio)):
                axes = rows[row][column]
                for (_, tail, spread, one), each in placed.items():
                    if one == noise:
                        paint(axes, tails.index(tail), spreads.index(spread), each)
                _label(axes, tails, spreads, row, column)
            rows[0][column].set_title(f"noise: doubles the updates at {noise:g} gradients", fontsize=9.5)
            rows[1][column].set_title("async beside the best synchronous one", fontsize=9.5)


def _label(axes: Any, tails: list[float], spreads: list[float], row: int, column: int) -> None:
    axes.set_xlim(-0.5, len(tails) - 0.5)
    axes.set_ylim(-0.5, len(spreads) - 0.5)
    axes.set_xticks(range(len(tails)), [f"{tail:g}" for tail in tails])
    axes.set_yticks(range(len(spreads)), [f"{spread:g}×" for spread in spreads])
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if row == 1:
        axes.set_xlabel("tail of a worker's times (lognormal sigma)")
    if column == 0:
        axes.set_ylabel("slowest worker over fastest, always")


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
    """Times relative to full sync, over the tail; a line for each unevenness."""
    noises, spreads = _noises(placed), sorted({cell[2] for cell in placed})
    with figure_in(file, 1, len(noises), size=(3.3 * len(noises) + 1.8, 3.6)) as made:
        panels = list(made) if len(noises) > 1 else [made]
        for axes, noise in zip(panels, noises, strict=True):
            for place, spread in enumerate(spreads):
                cells = sorted(cell for cell in placed if cell[2:] == (spread, noise))
                for family in FAMILIES:
                    if family == "full-sync":
                        continue
                    shown = [
                        (cell[1], placed[cell]["full-sync"].seconds.mean / placed[cell][family].seconds.mean)
                        for cell in cells
                    ]
                    axes.plot(
                        [x for x, _ in shown],
                        [y for _, y in shown],
                        color=COLOURS[family],
                        linestyle=("-", (0, (5, 2)), (0, (1, 1.5)))[min(place, 2)],
                        marker="o",
                        markersize=3,
                        linewidth=1.3,
                        label=f"{family}, {spread:g}×" if axes is panels[-1] else None,
                    )
            axes.axhline(1.0, color=COLOURS["full-sync"], linewidth=1)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_title(f"noise: doubles at {noise:g} gradients", fontsize=9.5)
            axes.set_xlabel("tail (lognormal sigma)")
        panels[0].set_ylabel("times as soon as full sync")
        panels[-1].legend(fontsize=7.5, frameon=False, handlelength=3, loc="upper left", bbox_to_anchor=(1.0, 1.0))


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
