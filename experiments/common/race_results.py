"""What a race came to: the tables and figures, from its trials alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common.curves import Point, first_reaching
from experiments.common.drawing import band, figure_in
from experiments.common.race import Method, Race, Trial
from experiments.common.spread import markdown, spread_of
from experiments.common.trials import Found

#: This share of a curve is not shown in full.
_BEGINNING = 0.05


class _Unit(NamedTuple):
    """What times are shown in."""

    name: str
    seconds: float

    def of(self, seconds: float) -> str:
        return f"{seconds / self.seconds:.3g} {self.name}"


def _unit(race: Race) -> _Unit:
    return _Unit("hours", 3600.0) if race.seconds > 3600 else _Unit("minutes", 60.0)


def write_race(race: Race, found: Found[Trial, Point], folder: Path, digits: int = 3) -> list[Path]:
    """summary.md, curves.png, tuning.png and, if there are any, shorter.png; `digits` of the measure are shown."""
    files = [folder / name for name in ("summary.md", "curves.png", "tuning.png")]
    parts = [
        f"Latency {latency}; every method with its tuned rate\n\n{_table(race, found, latency, digits)}"
        for latency in race.latencies
    ]
    if race.shares:
        parts.append(f"To the end of a shorter time, latency {race.latencies[0]}\n\n{_shorter(race, found, digits)}")
    if race.halved:
        parts.append(f"At half the rate, latency {race.latencies[0]}\n\n{_halved(race, found, digits)}")
    parts.append(
        f"Tuning: {race.measure} of one seed after {_unit(race).of(race.tuning_seconds)}, on {race.tuned_with}\n\n"
        f"{_tuning(race, found)}"
    )
    files[0].write_text("\n".join(parts))
    _draw_curves(race, found, files[1])
    _draw_tuning(race, found, files[2])
    if race.shares:
        files.append(folder / "shorter.png")
        _draw_shorter(race, found, files[-1], digits)
    return files


# ---------------------------------------------------------------- tables


def _table(race: Race, found: Found[Trial, Point], latency: str, digits: int) -> str:
    """A line for every method: what it ends with, hours to each target, and how much sooner than the reference."""
    targets = race.all_targets(found, latency)
    header = ["method", "rate", "updates", f"{race.measure} at the end"]
    header += [f"{_unit(race).name} to {target:.{digits}f}" for target in targets]
    lines = []
    for method in race.methods:
        curves = race.curves(method.name, found, latency)
        if not curves:
            continue
        end = _finals(race, curves).text(digits)
        cells = [_time(race, found, latency, curves, target) for target in targets]
        lines.append([method.name, f"{race.rate(method.name, found):g}", curves[0][-1].update, end, *cells])
    return markdown(header, lines)


def _shorter(race: Race, found: Found[Trial, Point], digits: int) -> str:
    """Synchronous methods with less time, beside the reference with all of it."""
    shorter = [(method.name, seconds, 1.0) for seconds in race.shorter() for method in race.in_less_time()]
    return _ends(race, found, [(race.reference, race.seconds, 1.0), *shorter], digits)


def _halved(race: Race, found: Found[Trial, Point], digits: int) -> str:
    """What half the rate changes, method by method."""
    both = [(name, race.part(share), times) for name, share in race.halved for times in (1.0, 0.5)]
    return _ends(race, found, both, digits)


def _ends(race: Race, found: Found[Trial, Point], which: list[tuple[str, float, float]], digits: int) -> str:
    """A line for every method, time and multiple of the tuned rate: the end, and who is where the reference ends."""
    latency = race.latencies[0]
    targets = race.all_targets(found, latency)
    if not targets:
        return "(not there yet)\n"
    rows = []
    for name, seconds, times in which:
        curves, rate = race.curves(name, found, latency, seconds, times), race.rate(name, found)
        if curves and rate is not None:
            finals = [race.final(curve) for curve in curves]
            there = sum(final >= targets[-1] if race.rising else final <= targets[-1] for final in finals)
            cells = [
                _unit(race).of(seconds),
                f"{race.seconds / seconds:.1f}×",
                f"{times * rate:g}",
                curves[0][-1].update,
            ]
            rows.append([name, *cells, _finals(race, curves).text(digits), f"{there} of {len(finals)}"])
    header = ["method", "time", "sooner", "rate", "updates", f"{race.measure} at the end"]
    return markdown([*header, f"seeds at {targets[-1]:.{digits}f}"], rows)


def _finals(race: Race, curves: Sequence[Sequence[Point]]) -> Any:
    return spread_of([race.final(curve) for curve in curves])


def _time(race: Race, found: Found[Trial, Point], latency: str, curves: list[list[Point]], target: float) -> str:
    own = seconds_to(race, curves, target)
    if len(own) < len(curves):
        return "never" if not own else f"never in {len(curves) - len(own)} of {len(curves)} seeds"
    text = spread_of([one / _unit(race).seconds for one in own]).text(2)
    reference = race.curves(race.reference, found, latency)
    others = seconds_to(race, reference, target)
    if not others or len(others) < len(reference):
        return text
    return f"{text} ({sum(others) / len(others) / (sum(own) / len(own)):.2f}×)"


def seconds_to(race: Race, curves: list[list[Point]], target: float) -> list[float]:
    """Virtual seconds to a target, of those seeds that reach it, in the mean of as many measurements as the end has."""
    points = [first_reaching(_smooth(curve, race.last), target, race.rising) for curve in curves]
    return [point.seconds for point in points if point is not None]


def _smooth(curve: Sequence[Point], last: int) -> list[Point]:
    """Each point with the mean of the last so many measures; those before the first mean are left out."""
    last = min(last, len(curve))
    means = [
        sum(point.measure for point in curve[place - last + 1 : place + 1]) / last
        for place in range(last - 1, len(curve))
    ]
    return [point._replace(measure=mean) for point, mean in zip(curve[last - 1 :], means, strict=True)]


def _tuning(race: Race, found: Found[Trial, Point]) -> str:
    lines = []
    for method in race.methods:
        trials, best = race.tuning(method, found)
        shown = []
        for trial in trials:
            if trial in found:
                points = found[trial]
                text = "diverged" if points[-1].diverged else f"{race.final(points):.4g}"
                shown.append(f"**{trial.lr:g}: {text}**" if trial == best else f"{trial.lr:g}: {text}")
        lines.append([method.name, len(shown), ", ".join(shown)])
    return markdown(["method", "trainings", "rate: measure"], lines)


# ---------------------------------------------------------------- figures


def _draw_curves(race: Race, found: Found[Trial, Point], file: Path) -> None:
    count, unit = len(race.latencies), _unit(race)
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


def _draw_shorter(race: Race, found: Found[Trial, Point], file: Path, digits: int) -> None:
    """What every seed ends with, by the time that it had. What is far worse is a triangle at the edge."""
    latency, unit = race.latencies[0], _unit(race)
    reference = [race.final(curve) for curve in race.curves(race.reference, found, latency)]
    with figure_in(file, size=(6.4, 3.8)) as axes:
        ends: list[tuple[Method, float, float]] = []
        off: dict[tuple[float, str], list[str]] = {}
        for method in race.methods:
            for seconds in (*race.shorter(), race.seconds):
                curves = race.curves(method.name, found, latency, seconds)
                ends += [(method, seconds / unit.seconds, race.final(curve)) for curve in curves]
        shown = sorted(end for _, _, end in ends)
        if not shown or not reference:
            return
        typical, worst = statistics.median(shown), max(reference, key=lambda end: -end if race.rising else end)
        room = 1.5 * max(abs(typical - (shown[-1] if race.rising else shown[0])), abs(worst - typical))
        edge = typical - room if race.rising else typical + room
        for method, at, end in ends:
            far = end < edge if race.rising else end > edge
            place = at * (1 + 0.012 * (race.methods.index(method) - len(race.methods) // 2))
            mark = ("v" if race.rising else "^") if far else ("s" if method.dashed else "o")
            fill = "none" if method.dashed else method.colour
            axes.plot([place], [edge if far else end], mark, ms=6, color=method.colour, mfc=fill)
            if far:
                off.setdefault((place, method.colour), []).append(f"{end:.{digits}f}")
        for (place, colour), numbers in off.items():
            below = {"xytext": (8, -3), "textcoords": "offset points", "fontsize": 7, "color": colour}
            axes.annotate(", ".join(numbers), (place, edge), **below, annotation_clip=False)
        for method in race.methods:
            mark, fill = ("s", "none") if method.dashed else ("o", method.colour)
            axes.plot([], [], mark, ms=6, color=method.colour, mfc=fill, label=method.name)
        axes.axhspan(min(reference), max(reference), color="black", alpha=0.12, lw=0)
        axes.set_xscale("log")
        times = sorted({at for _, at, _ in ends})
        axes.set_xticks(times, [f"{at:.3g}" for at in times])
        axes.set_xticks([], minor=True)
        axes.set(xlabel=f"{unit.name} of training, virtual; grey: {race.reference} with all of them", ylabel=race.unit)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _draw_tuning(race: Race, found: Found[Trial, Point], file: Path) -> None:
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
        axes.set_ylabel(f"{unit}\nafter {_unit(race).of(race.tuning_seconds)}, on {race.tuned_with}")
        if drawn:
            axes.legend(frameon=False, fontsize=8)


def _line(method: Method) -> str:
    return "--" if method.dashed else "-"
