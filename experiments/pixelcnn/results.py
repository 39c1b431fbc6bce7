"""What the PixelCNNs came to under the slow decay: ends, targets, hours to them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from experiments.common.curves import Point
from experiments.common.race import Control, Race, Trial
from experiments.common.race_tables import seconds_to
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.trials import Found
from experiments.pixelcnn.settings import FULL_8, FULL_16, ONE

#: As tables have them: what waits for nobody, for itself, for everybody, for all but one.
METHODS = ("async 16", "async 8", ONE, FULL_8, FULL_16, "7+1", "15+1")


def control(race: Race, name: str, times: float = 1.0, share: float = 1.0) -> Control | None:
    """The trainings of a method under the slow decay; None: none were planned."""
    return next((one for one in race.controls if (one.method, one.times, one.share) == (name, times, share)), None)


def curves(race: Race, found: Found[Trial, Point], name: str, times: float, share: float = 1.0) -> list[list[Point]]:
    """All seeds of a control; nothing while one is missing."""
    which = control(race, name, times, share)
    made = [] if which is None else race.controlled(which, found)
    return made if len(made) == len(race.seeds) else []


def end(race: Race, found: Found[Trial, Point], name: str, times: float, share: float = 1.0) -> Spread | None:
    some = curves(race, found, name, times, share)
    return spread_of([race.final(points) for points in some]) if some else None


def better(race: Race, found: Found[Trial, Point], name: str, share: float = 1.0) -> float | None:
    """The multiple of the tuned rate, 1 or ½, with which a method ends better on average; None: not run."""
    means = {
        times: statistics.fmean(race.final(points) for points in some)
        for times in (1.0, 0.5)
        if (some := curves(race, found, name, times, share))
    }
    return min(means, key=means.__getitem__) if means else None


def best_curves(race: Race, found: Found[Trial, Point], name: str) -> list[list[Point]]:
    """A method's, at the better of its two rates, over all of the time."""
    times = better(race, found, name)
    return [] if times is None else curves(race, found, name, times)


def targets(race: Race, found: Found[Trial, Point]) -> list[float]:
    """What one worker has, in its worst seed, after a quarter, half and all of its time."""
    made = []
    for share in (0.25, 0.5, 1.0):
        until = share * race.seconds if share < 1 else math.inf
        ones = [
            [point.measure for point in points if point.seconds <= until] for points in best_curves(race, found, ONE)
        ]
        made += [max(map(min, ones))] if ones and all(ones) else []
    return made


def hours(race: Race, found: Found[Trial, Point], name: str, target: float) -> Spread | None:
    """To a target, at the better rate; None: not run, or not all seeds get there."""
    some = best_curves(race, found, name)
    seconds = seconds_to(race, some, target)
    return spread_of([one / 3600 for one in seconds]) if some and len(seconds) == len(some) else None


def table(race: Race, found: Found[Trial, Point]) -> str:
    """A line for each method: both rates, and hours to what one worker has."""
    aims = targets(race, found)
    lines = []
    for name in METHODS:
        which, some = control(race, name), best_curves(race, found, name)
        rate = None if which is None else race.rate(which.rate_of or name, found)
        both = [end(race, found, name, times) for times in (1.0, 0.5)]
        reached = [hours(race, found, name, aim) for aim in aims]
        lines.append(
            [
                name,
                "–" if rate is None else f"{rate:g}",
                some[0][-1].update if some else "–",
                *("–" if one is None else one.text(3) for one in both),
                *("–" if not some else "never" if one is None else one.text(2) for one in reached),
            ]
        )
    head = ["method", "tuned rate", "updates", "bits at the end", "at half the rate"]
    return markdown([*head, *(f"hours to {aim:.3f}" for aim in aims)], lines)


def write(race: Race, found: Found[Trial, Point], folder: Path) -> list[Path]:
    """slow.md and slow.png."""
    from experiments.common.race_figures import draw_panels

    files = [folder / "slow.md", folder / "slow.png"]
    files[0].write_text(
        "Slow decay, one clip norm for everybody; hours at the better of the two rates\n\n" + table(race, found)
    )
    latency = race.latencies[0]
    methods = [race.method(name) for name in METHODS]
    draw_panels(
        race, methods, lambda name, _: best_curves(race, found, name), {latency: targets(race, found)}, files[1]
    )
    return files
