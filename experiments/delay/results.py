"""What trainings came to: by method, over their seeds, and in seconds."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import spread
from experiments.delay.rows import Row, Setting, final_accuracy
from quorate.errors import BadInput

SECONDS = "iteration_seconds.csv"


class Training(NamedTuple):
    """A training that has ended: its curve in the order of updates."""

    setting: Setting
    rows: list[Row]

    @property
    def accuracy(self) -> float:
        return final_accuracy(self.rows, self.setting.guessing)


#: (net, delay, repair) -> its trainings
Methods = dict[tuple[str, int, str], list[Training]]


def by_method(found: Mapping[Any, list[Row]], tuning: bool) -> Methods:
    """The trainings that tuned, or those that came of it."""
    methods: Methods = {}
    for setting, rows in found.items():
        if setting.tuning == tuning:
            methods.setdefault(setting.method, []).append(Training(setting, rows))
    return methods


class Spread(NamedTuple):
    """Several seeds of one method."""

    mean: float
    lowest: float
    highest: float
    half_width: float  # of the 95 % interval of the mean
    seeds: int
    diverged: int


def spread_of(trainings: list[Training]) -> Spread:
    """The final accuracies of some trainings."""
    finals = spread.spread_of([training.accuracy for training in trainings])
    broken = sum(training.rows[-1].diverged for training in trainings)
    return Spread(finals.mean, finals.lowest, finals.highest, finals.half_width, finals.seeds, broken)


def read_iteration_s(file: Path) -> dict[tuple[str, int], float]:
    """(net, delay) -> seconds an iteration takes, from a table with the columns net, delay and iteration_s."""
    try:
        with file.open(newline="") as opened:
            lines = [line for line in opened if not line.startswith("#")]
        return {(line["net"], int(line["delay"])): float(line["iteration_s"]) for line in csv.DictReader(lines)}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise BadInput(
            f"{str(file)!r} cannot be read as seconds of iterations ({error}); "
            f"give a CSV with the columns net, delay and iteration_s"
        ) from error


def are_assumed(file: Path) -> bool:
    """Whether the table of seconds says of itself that nobody measured them."""
    return any(line.startswith("#") and "ASSUMED" in line for line in file.read_text().splitlines())


def seconds_to(trainings: list[Training], accuracy: float, iteration_s: float) -> float | None:
    """When the mean of the seeds has this accuracy, between two measurements in a straight line; None: it never has."""
    before = (0, trainings[0].setting.guessing)
    for updates in sorted({row.update for training in trainings for row in training.rows}):
        values = [row.accuracy for training in trainings for row in training.rows if row.update == updates]
        now = (updates, statistics.mean(values))
        if now[1] >= accuracy:
            share = (accuracy - before[1]) / (now[1] - before[1]) if now[1] > before[1] else 1.0
            return (before[0] + share * (now[0] - before[0])) * iteration_s
        before = now
    return None
