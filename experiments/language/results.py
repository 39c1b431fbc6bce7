"""What backups come to at one rate for all: seconds and updates apart, as a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.common.curves import Point, first_reaching
from experiments.common.drawing import COLOURS, PUBLISHED, figure_in, in_words, outer_legend
from experiments.common.race import Race, Trial, seconds_an_update
from experiments.common.race_tables import seconds_to
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.trials import Found
from experiments.language.settings import BACKUPS, MACHINES, OWN_RATE, shared_rate, split

Curves = list[list[Point]]


class Backups(NamedTuple):
    """A number of backups under a latency. None: not run, or not all seeds reach the target.

    update_s: seconds per update, foretold by rounds without training.
    end: loss after all of the time. equal: loss after as many updates as full sync has in it.
    reached: updates to full sync's worst end, seed by seed; a seed that never gets there has none.
    minutes: to the same. sooner: full sync's minutes over these, seed by seed.
    """

    name: str
    rate: float
    updates: int
    update_s: float
    end: Spread
    equal: Spread | None
    seeds: int
    reached: list[int]
    minutes: Spread | None
    sooner: Spread | None


def target(race: Race, found: Found[Trial, Point], latency: str) -> float:
    """What full sync ends with in its worst seed."""
    return max(race.final(points) for points in race.controlled(shared_rate(0), found, latency))


def rows(race: Race, found: Found[Trial, Point], latency: str) -> list[Backups]:
    """All numbers of backups at full sync's rate, then 14+2 at its own."""
    none = race.controlled(shared_rate(0), found, latency)
    made = []
    for control, equal in (
        *((shared_rate(backups), shared_rate(backups, equal_updates=True)) for backups in BACKUPS),
        (OWN_RATE, None),
    ):
        curves = race.controlled(control, found, latency)
        if not none or len(curves) < len(none):
            continue
        same = curves if control == shared_rate(0) else [] if equal is None else race.controlled(equal, found, latency)
        method = race.method(control.method)
        seconds = _seconds(race, found, latency, curves)
        points = [first_reaching(one, target(race, found, latency), race.rising) for one in curves]
        made.append(
            Backups(
                control.method,
                race.trials_of(control, found, latency)[0].lr,
                curves[0][-1].update,
                seconds_an_update(method.policy, method.workers, latency),
                spread_of([race.final(points) for points in curves]),
                spread_of([race.final(points) for points in same]) if same else None,
                len(curves),
                [point.update for point in points if point is not None],
                None if seconds is None else spread_of([one / 60 for one in seconds]),
                _sooner(_seconds(race, found, latency, none), seconds),
            )
        )
    return made


def _seconds(race: Race, found: Found[Trial, Point], latency: str, curves: Curves) -> list[float] | None:
    seconds = seconds_to(race, curves, target(race, found, latency))
    return seconds if len(seconds) == len(curves) else None


def _sooner(none: Sequence[float] | None, some: Sequence[float] | None) -> Spread | None:
    if none is None or some is None:
        return None
    return spread_of([one / other for one, other in zip(none, some, strict=True)])


def table(race: Race, found: Found[Trial, Point]) -> str:
    """A line for each number of backups under each latency; (full sync's seconds over these) in brackets."""
    head = ["", "split", "rate", "s an update", "updates", "loss at the end", "after full sync's updates"]
    lines = []
    for latency in race.latencies:
        some = rows(race, found, latency)
        for place, one in enumerate(some):
            all_there = len(one.reached) == one.seeds
            lines.append(
                [
                    "" if place else f"{in_words(latency)}; target {target(race, found, latency):.3f}",
                    one.name,
                    f"{one.rate:g}",
                    f"{one.update_s:.2f} ({some[0].update_s / one.update_s:.2f})",
                    one.updates,
                    one.end.text(3),
                    "–" if one.equal is None else one.equal.text(3),
                    spread_of([float(count) for count in one.reached]).text(0)
                    if all_there
                    else f"{len(one.reached)} of {one.seeds} seeds there",
                    "–" if one.minutes is None else one.minutes.text(1),
                    "–" if one.sooner is None else one.sooner.text(2),
                ]
            )
    return markdown([*head, "updates to the target", "minutes to it", "sooner"], lines)


def draw(file: Path, race: Race, found: Found[Trial, Point]) -> None:
    """Times as soon as full sync by the number of backups: between no noise and noise alone, and as measured."""
    there = [latency for latency in race.latencies if rows(race, found, latency)]
    with figure_in(file, 1, max(1, len(there)), 3.4, squeeze=False) as drawn:
        for axes, latency in zip(drawn[0], there, strict=False):
            lines = [one for one in rows(race, found, latency) if one.rate == rows(race, found, latency)[0].rate]
            own = [one for one in rows(race, found, latency) if one not in lines]
            names = [one.name for one in lines]
            seconds = [lines[0].update_s / one.update_s for one in lines]
            noisy = [one * _quorum(name) / MACHINES for one, name in zip(seconds, names, strict=True)]
            axes.fill_between(
                range(len(names)),
                noisy,
                seconds,
                color=PUBLISHED,
                alpha=0.15,
                lw=0,
                label="theory, from noise alone to none",
            )
            for what, some, colour in (
                ("full sync's rate for all", lines, COLOURS["backup"]),
                ("its own rate", own, COLOURS["full-sync"]),
            ):
                points = [
                    (names.index(one.name), one.sooner) for one in some if one.sooner is not None and one.name in names
                ]
                if points:
                    axes.errorbar(
                        [place + 0.08 * (some is own) for place, _ in points],
                        [one.mean for _, one in points],
                        yerr=[0.0 if math.isnan(one.half_width) else one.half_width for _, one in points],
                        fmt="o",
                        ms=4,
                        capsize=2,
                        color=colour,
                        label=what,
                    )
            axes.axhline(1.0, color="#777777", lw=0.8, ls=":")
            axes.set_xticks(range(len(names)), [str(MACHINES - _quorum(name)) for name in names])
            axes.set_ylim(0, None)
            axes.set_title(in_words(latency), fontsize=9.5)
        drawn[0][0].set_ylabel("times as soon as full sync")
        drawn[0][0].get_figure().supxlabel(f"backups of {MACHINES} machines", fontsize=9.5)
        outer_legend(drawn[0])


def _quorum(name: str) -> int:
    return next(MACHINES - backups for backups in BACKUPS if split(backups) == name)
