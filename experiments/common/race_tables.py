"""What a race came to, as tables: who ends where, and who is where first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.common.curves import Point, first_reaching
from experiments.common.race import Race, Trial
from experiments.common.spread import markdown, spread_of
from experiments.common.trials import Found


class Unit(NamedTuple):
    """What times are shown in."""

    name: str
    seconds: float

    def of(self, seconds: float) -> str:
        return f"{seconds / self.seconds:.3g} {self.name}"


def unit_of(race: Race) -> Unit:
    return Unit("hours", 3600.0) if race.seconds > 3600 else Unit("minutes", 60.0)


def method_table(race: Race, found: Found[Trial, Point], latency: str, digits: int) -> str:
    """A line for every method: what it ends with, hours to each target, and how much sooner than the reference."""
    targets = race.all_targets(found, latency)
    header = ["method", "rate", "updates", f"{race.measure} at the end"]
    header += [f"{unit_of(race).name} to {target:.{digits}f}" for target in targets]
    lines = []
    for method in race.methods:
        curves = race.curves(method.name, found, latency)
        if not curves:
            continue
        end = _finals(race, curves).text(digits)
        cells = [_time(race, found, latency, curves, target) for target in targets]
        lines.append([method.name, f"{race.rate(method.name, found):g}", curves[0][-1].update, end, *cells])
    return markdown(header, lines)


def shorter_table(race: Race, found: Found[Trial, Point], digits: int) -> str:
    """Synchronous methods with less time, beside the reference with all of it."""
    shorter = [(method.name, seconds, 1.0) for seconds in race.shorter() for method in race.in_less_time()]
    return _ends(race, found, [(race.reference, race.seconds, 1.0), *shorter], digits)


def halved_table(race: Race, found: Found[Trial, Point], digits: int) -> str:
    """What half the rate changes, method by method."""
    both = [(name, race.part(share), times) for name, share in race.halved for times in (1.0, 0.5)]
    return _ends(race, found, both, digits)


def controls_table(race: Race, found: Found[Trial, Point], digits: int) -> str:
    """A line for every control under each of its latencies, as far as they were run."""
    rows = []
    for control in race.controls:
        for latency in control.latencies or race.latencies[:1]:
            trials, curves = race.trials_of(control, found, latency), race.controlled(control, found, latency)
            if curves:
                cells = [f"{trials[0].lr:g}", unit_of(race).of(trials[0].seconds), curves[0][-1].update]
                end = _finals(race, curves).text(digits)
                missing = f" ({len(curves)} of {len(trials)} seeds)" * (len(curves) < len(trials))
                rows.append([control.method, latency, control.protocol, *cells, end + missing])
    header = ["method", "latency", "protocol", "rate", "time", "updates", f"{race.measure} at the end"]
    return markdown(header, rows) if rows else "(not there yet)\n"


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
                unit_of(race).of(seconds),
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
    text = spread_of([one / unit_of(race).seconds for one in own]).text(2)
    reference = race.curves(race.reference, found, latency)
    others = seconds_to(race, reference, target)
    if not others or len(others) < len(reference):
        return text
    return f"{text} ({sum(others) / len(others) / (sum(own) / len(own)):.2f}×)"


def seconds_to(race: Race, curves: list[list[Point]], target: float) -> list[float]:
    """Virtual seconds to a target, of those seeds that reach it, in the mean of as many measurements as the end has."""
    points = [first_reaching(smoothed(curve, race.last), target, race.rising) for curve in curves]
    return [point.seconds for point in points if point is not None]


def smoothed(curve: Sequence[Point], last: int) -> list[Point]:
    """Each point with the mean of the last so many measures; those before the first mean are left out."""
    last = min(last, len(curve))
    means = [
        sum(point.measure for point in curve[place - last + 1 : place + 1]) / last
        for place in range(last - 1, len(curve))
    ]
    return [point._replace(measure=mean) for point, mean in zip(curve[last - 1 :], means, strict=True)]


def tuning_table(race: Race, found: Found[Trial, Point]) -> str:
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
