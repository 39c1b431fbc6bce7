"""What a race came to, as figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from experiments.common.curves import Point
from experiments.common.drawing import PALETTE, figure_in, in_words, outer_legend, seeds
from experiments.common.race import Method, Race, Trial
from experiments.common.race_tables import smoothed, unit_of
from experiments.common.trials import Found

#: The curves of a method under a latency.
CurvesOf = Callable[[str, str], list[list[Point]]]
#: This share of a curve is not shown in full.
_BEGINNING = 0.1


def draw_curves(race: Race, found: Found[Trial, Point], file: Path) -> None:
    """Every method with its tuned rate."""
    targets = {latency: race.all_targets(found, latency) for latency in race.latencies}
    draw_panels(race, race.methods, lambda name, latency: race.curves(name, found, latency), targets, file)


def draw_panels(
    race: Race, methods: Sequence[Method], curves_of: CurvesOf, targets: dict[str, list[float]], file: Path
) -> None:
    """A panel for each latency, or for each group of methods: medians as thick lines, seeds as thin ones."""
    there = [method for method in methods if any(curves_of(method.name, latency) for latency in targets)]
    groups = list(dict.fromkeys(method.panel for method in there if method.panel)) or [""]
    panels = [(latency, group) for latency in targets for group in groups]
    unit = unit_of(race)
    with figure_in(file, 1, len(panels), 4.0, squeeze=False, sharey=True) as drawn:
        for axes, (latency, group) in zip(drawn[0], panels, strict=True):
            for method in methods:
                curves = curves_of(method.name, latency) if method.panel in ("", group) else []
                if curves:
                    lines = [
                        [(point.seconds / unit.seconds, point.measure) for point in smoothed(curve, race.last)]
                        for curve in curves
                    ]
                    seeds(axes, lines, method.colour, method.title, linestyle=_line(method))
            for target in targets[latency]:
                axes.axhline(target, color="#777777", lw=0.9, ls=":", label="targets" if axes is drawn[0][-1] else None)
            axes.set_xlim(0, 1.02 * race.seconds / unit.seconds)
            axes.set_xlabel(f"virtual {unit.name}")
            axes.set_title(f"{group}, {in_words(latency)}" if group else in_words(latency))
        every = [one for latency in targets for method in methods for one in curves_of(method.name, latency)]
        drawn[0][0].set_ylim(*_limits(race, every))
        drawn[0][0].set_ylabel(race.unit + (f",\nmean of {race.last} evaluations" if race.last > 1 else ""))
        axes.plot([], [], color="#777777", lw=0.7, label="single seeds")
        outer_legend(drawn[0], 4)


def _limits(race: Race, curves: list[list[Point]]) -> tuple[float | None, float | None]:
    """How far the axis goes. The first minutes, and what goes wrong later, would squeeze the rest."""
    there = [(point.seconds / race.seconds, point.measure) for curve in curves for point in smoothed(curve, race.last)]
    good = [y for x, y in there if x > _BEGINNING and math.isfinite(y)]
    bad = [y for x, y in there if _BEGINNING < x < 2 * _BEGINNING and math.isfinite(y)] or good
    if not good or min(good) == max(good):
        return None, None
    best, worst = (max(good), min(bad)) if race.rising else (min(good), max(bad))
    room = 0.05 * abs(best - worst)
    return min(best, worst) - room, max(best, worst) + room


def draw_ends(race: Race, found: Found[Trial, Point], file: Path, digits: int) -> None:
    """What every seed ends with: a row for each method and time, a mark for each protocol and rate.

    What is far worse is a triangle at the edge. A band is the reference at its best.
    """
    there = {key: ends for key, ends in _ends(race, found).items() if ends}
    rows = sorted({(share, name) for share, name, _ in there}, key=lambda one: (-one[0], _order(race, one[1])))
    kinds = sorted({kind for _, _, kind in there}, key=lambda one: (one[0], -one[1]))
    with figure_in(file, height=1.2 + 0.36 * max(1, len(rows))) as axes:
        if not there:
            return
        edge = _edge(race, [end for ends in there.values() for end in ends])
        for kind, colour in zip(kinds, PALETTE, strict=False):
            marker = "D" if kind[1] < 1 else "o"
            axes.plot([], [], marker, ms=5, mfc="none", color=colour, label=_kind(race, *kind))
            for place, row in enumerate(rows):
                own = [one for one in kinds if (*row, one) in there]
                if kind not in own:
                    continue
                y = place + 0.2 * (own.index(kind) - (len(own) - 1) / 2)
                ends = there[(*row, kind)]
                near = [end for end in ends if (end >= edge if race.rising else end <= edge)]
                axes.plot(near, [y] * len(near), marker, ms=5, mfc="none", color=colour)
                if len(near) < len(ends):
                    far = ", ".join(f"{end:.{digits}f}" for end in ends if end not in near)
                    axes.plot([edge], [y], "<" if race.rising else ">", ms=6, color=colour)
                    axes.annotate(far, (edge, y), (4, -12), textcoords="offset points", ha="right", fontsize=8)
        of_reference = [ends for (share, name, _), ends in there.items() if (share, name) == (1.0, race.reference)]
        if of_reference:
            best = (max if race.rising else min)(of_reference, key=statistics.fmean)
            axes.axvspan(min(best), max(best), color="black", alpha=0.12, lw=0, label=f"{race.reference} at its best")
        axes.set_yticks(range(len(rows)), [_row(*row) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(f"{race.unit}, at the end of {unit_of(race).of(race.seconds)}, or of the share of it")
        outer_legend([axes], 2)


def _row(share: float, name: str) -> str:
    return name if share == 1 else f"{name}, {Fraction(share).limit_denominator(9)} of the time"


Kind = tuple[str, float]  # protocol, multiple of the tuned rate


def _ends(race: Race, found: Found[Trial, Point]) -> dict[tuple[float, str, Kind], list[float]]:
    """Final measures under the first latency, by share of the time, method and kind."""
    latency = race.latencies[0]
    made = {
        (share, method.name, ("", 1.0)): race.curves(method.name, found, latency, race.part(share))
        for method in race.methods
        for share in (1.0, *race.shares)
    }
    for name, share in race.halved:
        made[share, name, ("", 0.5)] = race.curves(name, found, latency, race.part(share), 0.5)
    for control in race.controls:
        key = (control.share, control.method, (control.protocol, control.times))
        made[key] = race.controlled(control, found)
    return {key: [race.final(curve) for curve in curves] for key, curves in made.items()}


def _edge(race: Race, ends: list[float]) -> float:
    """What is worse than this would squeeze the others."""
    best, typical = (max if race.rising else min)(ends), statistics.median(ends)
    return typical + 2.5 * (typical - best)


def _kind(race: Race, protocol: str, times: float) -> str:
    rate = "tuned rate" if times == 1 else "half the tuned rate" if times == 0.5 else f"{times:g} × the tuned rate"
    return f"{protocol or race.own_protocol}, {rate}" if protocol or race.own_protocol else rate


def _order(race: Race, name: str) -> int:
    return [method.name for method in (*race.methods, *race.untuned)].index(name)


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
