"""What a race came to, as figures."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common.curves import Point
from experiments.common.drawing import band, figure_in
from experiments.common.race import Method, Race, Trial
from experiments.common.race_tables import unit_of
from experiments.common.trials import Found

#: This share of a curve is not shown in full.
_BEGINNING = 0.05


def draw_curves(race: Race, found: Found[Trial, Point], file: Path) -> None:
    count, unit = len(race.latencies), unit_of(race)
    with figure_in(file, 1, count, (4.4 * count + 1.6, 3.8)) as drawn:
        panels = [drawn] if count == 1 else list(drawn)
        for axes, latency in zip(panels, race.latencies, strict=True):
            lowest, highest = math.inf, -math.inf
            for method in race.methods:
                curves = race.curves(method.name, found, latency)
                if curves:
                    lines = [[(point.seconds / unit.seconds, point.measure) for point in curve] for curve in curves]
                    band(axes, lines, method.colour, method.name, linestyle=_line(method))
                    lowest, highest = _limits(race, curves, lowest, highest)
            for target in race.all_targets(found, latency):
                axes.axhline(target, color="#AAAAAA", lw=0.7, ls=":")
            if lowest < highest:
                room = 0.05 * (highest - lowest)
                axes.set_ylim(lowest - room, highest + room)
            axes.set_xlim(0, 1.02 * race.seconds / unit.seconds)
            axes.set_xlabel(f"{unit.name}, virtual")
            axes.set_title(latency)
        panels[0].set_ylabel(race.unit)
        panels[-1].legend(frameon=False, fontsize=8)


def _limits(race: Race, curves: list[list[Point]], lowest: float, highest: float) -> tuple[float, float]:
    """How far an axis must go. The first minutes, and what goes wrong later, would squeeze the rest."""
    there = [(point.seconds / race.seconds, point.measure) for curve in curves for point in curve]
    good = [y for x, y in there if x > _BEGINNING and y == y]
    bad = [y for x, y in there if _BEGINNING < x < 4 * _BEGINNING and y == y]
    if race.rising:
        return min([lowest, *bad]), max([highest, *good])
    return min([lowest, *good]), max([highest, *bad])


class _End(NamedTuple):
    """Where a training ended. halved: it had half the tuned rate."""

    method: Method
    time: float
    measure: float
    halved: bool = False


def draw_shorter(race: Race, found: Found[Trial, Point], file: Path, digits: int) -> None:
    """What every seed ends with, by the time that it had. What is far worse is a triangle at the edge."""
    ends = _ends(race, found)
    reference = [race.final(curve) for curve in race.curves(race.reference, found, race.latencies[0])]
    with figure_in(file, size=(6.4, 3.8)) as axes:
        if not reference:
            return
        edge = _edge(race, [end.measure for end in ends], reference)
        far_off: dict[tuple[float, str], list[str]] = {}
        for end in ends:
            is_far = end.measure < edge if race.rising else end.measure > edge
            shift = race.methods.index(end.method) - len(race.methods) // 2 + 3 * end.halved
            place = end.time * (1 + 0.012 * shift)
            look = _mark(end.method, end.halved)
            if is_far:
                look["marker"] = "v" if race.rising else "^"
                far_off.setdefault((place, end.method.colour), []).append(f"{end.measure:.{digits}f}")
            axes.plot([place], [edge if is_far else end.measure], **look)
        for (place, colour), numbers in far_off.items():
            beside = {"xytext": (8, -3), "textcoords": "offset points", "fontsize": 7, "color": colour}
            axes.annotate(", ".join(numbers), (place, edge), **beside, annotation_clip=False)
        for method, halved in sorted({(end.method, end.halved) for end in ends}, key=lambda one: _order(race, *one)):
            axes.plot([], [], **_mark(method, halved), label=f"{method.name}, half the rate" if halved else method.name)
        axes.axhspan(min(reference), max(reference), color="black", alpha=0.12, lw=0)
        axes.set_xscale("log")
        times = sorted({end.time for end in ends})
        axes.set_xticks(times, [f"{time:.3g}" for time in times])
        axes.set_xticks([], minor=True)
        unit = unit_of(race).name
        axes.set(xlabel=f"{unit} of training, virtual; grey: {race.reference} with all of them", ylabel=race.unit)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _ends(race: Race, found: Found[Trial, Point]) -> list[_End]:
    times = [(method, seconds, False) for method in race.methods for seconds in (*race.shorter(), race.seconds)]
    times += [(race.method(name), race.part(share), True) for name, share in race.halved]
    return [
        _End(method, seconds / unit_of(race).seconds, race.final(curve), halved)
        for method, seconds, halved in times
        for curve in race.curves(method.name, found, race.latencies[0], seconds, 0.5 if halved else 1.0)
    ]


def _edge(race: Race, ends: list[float], reference: list[float]) -> float:
    """What is worse than this would squeeze the others."""
    typical = statistics.median(ends)
    best, worst = (max(ends), min(reference)) if race.rising else (min(ends), max(reference))
    room = 1.5 * max(abs(typical - best), abs(worst - typical))
    return typical - room if race.rising else typical + room


def _mark(method: Method, halved: bool) -> dict[str, Any]:
    """How a training is drawn: filled or open by the method, a diamond at half the rate."""
    marker = "D" if halved else "s" if method.dashed else "o"
    fill = "none" if method.dashed or halved else method.colour
    return {"marker": marker, "ls": "", "ms": 5 if halved else 6, "color": method.colour, "mfc": fill}


def _order(race: Race, method: Method, halved: bool) -> tuple[bool, int]:
    return halved, race.methods.index(method)


def draw_tuning(race: Race, found: Found[Trial, Point], file: Path) -> None:
    with figure_in(file) as axes:
        drawn: list[float] = []
        for method in race.methods:
            trials, best = race.tuning(method, found)
            points = [
                (trial.lr, race.final(found[trial]))
                for trial in trials
                if trial in found and race.score(found[trial]) > -math.inf
            ]
            if not points:
                continue
            drawn += [y for _, y in points]
            axes.plot(*zip(*points, strict=True), "o", ls=_line(method), ms=3, color=method.colour, label=method.name)
            if best is not None and best in found:
                axes.plot([best.lr], [race.final(found[best])], "o", ms=8, mfc="none", color=method.colour)
        axes.set_xscale("log")
        if not race.rising and drawn and max(drawn) > 3 * min(drawn) > 0:
            axes.set_yscale("log")
        axes.set_xlabel("learning rate; a ring is round what was chosen")
        unit = race.unit.removeprefix("test ")
        axes.set_ylabel(f"{unit}\nafter {unit_of(race).of(race.tuning_seconds)}, on {race.tuned_with}")
        if drawn:
            axes.legend(frameon=False, fontsize=8)


def _line(method: Method) -> str:
    return "--" if method.dashed else "-"
