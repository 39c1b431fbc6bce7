"""One training as a curve: what the test data said, version by version, on the library's public interface."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import quorate


class Point(NamedTuple):
    """A version of a training, measured. `diverged`: nothing finite came after it, or the run could not go on."""

    update: int
    seconds: float  # of the engine's clock; virtual time where the engine is simulated
    samples: int  # whose gradients were applied so far
    measure: float
    loss: float
    diverged: int = 0


def train_curve(
    task: Any,
    policy: quorate.Policy,
    engine: quorate.Engine,
    measure: str,
    loss: str = "test_loss",
    **options: Any,
) -> list[Point]:
    """Train, and give a point for each evaluation; `options` are those of `quorate.train`.

    measure, loss: names among what the task's `evaluate` gives.
    """
    points: list[Point] = []

    class Points(quorate.Recorder):
        samples = 0

        def applied(self, time: float, update: Any) -> None:
            self.samples += sum(ticket.samples for ticket in update.tickets)

        def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
            points.append(Point(version, time, self.samples, measures[measure], measures.get(loss, math.nan)))

    try:
        quorate.train(task, policy, engine, recorders=(Points(),), **options)
    except quorate.Diverged:
        last = points.pop() if points else Point(0, 0.0, 0, math.nan, math.nan)
        points.append(last._replace(diverged=1))
    return points


def first_reaching(points: list[Point], target: float, rising: bool = True) -> Point | None:
    """Where a curve first reaches a target, between two measurements in a straight line; None: it never does.

    rising: more is better; a measure that is NaN is passed over.
    """
    before: Point | None = None
    for point in points:
        if math.isnan(point.measure):
            continue
        if (point.measure >= target) if rising else (point.measure <= target):
            if before is None or point.measure == before.measure:
                return point
            share = (target - before.measure) / (point.measure - before.measure)
            between = [one + share * (other - one) for one, other in zip(before[:3], point[:3], strict=True)]
            return point._replace(
                update=round(between[0]), seconds=between[1], samples=round(between[2]), measure=target
            )
        before = point
    return None
