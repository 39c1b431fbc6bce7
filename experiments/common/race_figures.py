"""What a race came to, as figures."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common.curves import Point
from experiments.common.drawing import figure_in, in_words, outer_legend, seeds
from experiments.common.race import Method, Race, Trial
from experiments.common.race_tables import smoothed, unit_of
from experiments.common.trials import Found

#: This share of a curve is not shown in full.
_BEGINNING = 0.1


def draw_curves(race: Race, found: Found[Trial, Point], file: Path) -> None:
    """A panel for each latency, or for each group of methods: medians as thick lines, seeds as thin ones."""
    groups = list(dict.fromkeys(method.panel for method in race.methods if method.panel)) or [""]
    panels = [(latency, group) for latency in race.latencies for group in groups]
    unit = unit_of(race)
    with figure_in(file, 1, len(panels), 4.0, squeeze=False, sharey=True) as drawn:
        for axes, (latency, group) in zip(drawn[0], panels, strict=True):
            for method in race.methods:
                curves = race.curves(method.name, found, latency) if method.panel in ("", group) else []
                if curves:
                    lines = [
                        [(point.seconds / unit.seconds, point.measure) for point in smoothed(curve, race.last)]
                        for curve in curves
                    ]
                    seeds(axes, lines, method.colour, method.title, linestyle=_line(method))
            for target in race.all_targets(found, latency):
                axes.axhline(target, color="#777777", lw=0.9, ls=":", label="targets" if axes is drawn[0][-1] else None)
            axes.set_xlim(0, 1.02 * race.seconds / unit.seconds)
            axes.set_xlabel(f"virtual {unit.name}")
            axes.set_title(f"{group}, {in_words(latency)}" if group else in_words(latency))
        drawn[0][0].set_ylim(*_limits(race, found))
        drawn[0][0].set_ylabel(race.unit + (f",\nmean of {race.last} evaluations" if race.last > 1 else ""))
        axes.plot([], [], color="#777777", lw=0.7, label="single seeds")
        outer_legend(drawn[0], 4)


def _limits(race: Race, found: Found[Trial, Point]) -> tuple[float | None, float | None]:
    """How far the axis goes. The first minutes, and what goes wrong later, would squeeze the rest."""
    curves = [
        one for latency in race.latencies for method in race.methods for one in race.curves(method.name, found, latency)
    ]
    there = [(point.seconds / race.seconds, point.measure) for curve in curves for point in smoothed(curve, race.last)]
    good = [y for x, y in there if x > _BEGINNING and math.isfinite(y)]
    bad = [y for x, y in there if _BEGINNING < x < 2 * _BEGINNING and math.isfinite(y)] or good
    if not good or min(good) == max(good):
        return None, None
    best, worst = (max(good), min(bad)) if race.rising else (min(good), max(bad))
    room = 0.05 * abs(best - worst)
    return min(best, worst) - room, max(best, worst) + room


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
    with figure_in(file) as axes:
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
            axes.plot(
                [], [], **_mark(method, halved), label=f"{method.title}, half the rate" if halved else method.title
            )
        whole = f"{race.reference}, all of the time"
        axes.axhspan(min(reference), max(reference), color="black", alpha=0.12, lw=0, label=whole)
        axes.set_xscale("log")
        times = sorted({end.time for end in ends})
        axes.set_xticks(times, [f"{time:.3g}" for time in times])
        axes.set_xticks([], minor=True)
        unit = unit_of(race).name
        axes.set(xlabel=f"virtual {unit} of training", ylabel=f"{race.unit}, at the end")
        outer_legend([axes], 4)


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
    with figure_in(file, height=3.6) as axes:
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
            axes.plot(*zip(*points, strict=True), "o", ls=_line(method), ms=3, color=method.colour, label=method.title)
            if best is not None and best in found:
                axes.plot([best.lr], [race.final(found[best])], "o", ms=8, mfc="none", color=method.colour)
        axes.set_xscale("log")
        if not race.rising and drawn and max(drawn) > 3 * min(drawn) > 0:
            axes.set_yscale("log")
        axes.set_xlabel("learning rate (a ring is round what was chosen)")
        unit = race.unit.removeprefix("test ")
        axes.set_ylabel(f"{unit}\nafter {unit_of(race).of(race.tuning_seconds)}, on {race.tuned_with}")
        outer_legend([axes])


def _line(method: Method) -> str:
    return "--" if method.dashed else "-"
