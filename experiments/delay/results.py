"""The study's tables: curves of every training, and how long an iteration takes."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import NamedTuple, get_type_hints

from experiments.delay.settings import Setting
from experiments.delay.training import GUESSING, Row
from quorate.errors import BadInput

CURVES = "curves.csv"
SECONDS = "iteration_seconds.csv"


def append_rows(folder: Path, rows: list[Row]) -> None:
    """Add a finished training to the curves."""
    file = folder / CURVES
    new = not file.exists()
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        if new:
            writer.writerow(Row._fields)
        writer.writerows(rows)


def read_curves(folder: Path) -> list[Row]:
    """All rows there are; none where nothing was run."""
    file = folder / CURVES
    if not file.exists():
        return []
    convert = list(get_type_hints(Row).values())
    with file.open(newline="") as opened:
        reader = csv.reader(opened)
        if tuple(next(reader, ())) != Row._fields:
            raise BadInput(f"{str(file)!r} is no table of this study: it has other columns; give another folder")
        return [Row(*(kind(value) for kind, value in zip(convert, line, strict=True))) for line in reader]


def setting_of(row: Row) -> Setting:
    """The training that a row is of."""
    return Setting(
        net=row.net,
        delay=row.delay,
        repair=row.repair,
        lr=row.lr,
        seed=row.seed,
        momentum=row.momentum,
        compensation=row.compensation,
    )


def final_accuracy(rows: list[Row]) -> float:
    """Of the last version; one that diverged can only guess."""
    return GUESSING if rows[-1].diverged else rows[-1].accuracy


class Spread(NamedTuple):
    """Several seeds of one method."""

    mean: float
    lowest: float
    highest: float
    deviation: float
    seeds: int
    diverged: int


def spread_of(trainings: list[list[Row]]) -> Spread:
    """The final accuracies of some trainings."""
    finals = [final_accuracy(rows) for rows in trainings]
    deviation = statistics.stdev(finals) if len(finals) > 1 else 0.0
    broken = sum(rows[-1].diverged for rows in trainings)
    return Spread(statistics.mean(finals), min(finals), max(finals), deviation, len(finals), broken)


def by_method(rows: list[Row], tuning: bool) -> dict[tuple[str, int, str], list[list[Row]]]:
    """(net, delay, repair) -> its trainings, each a curve in the order of updates."""
    found: dict[tuple[str, int, str], dict[Setting, list[Row]]] = {}
    for row in rows:
        setting = setting_of(row)
        if setting.tuning == tuning:
            found.setdefault(setting.method, {}).setdefault(setting, []).append(row)
    return {method: list(trainings.values()) for method, trainings in found.items()}


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


def seconds_to(trainings: list[list[Row]], accuracy: float, iteration_s: float) -> float | None:
    """When the mean of the seeds has this accuracy, between two measurements in a straight line; None: it never has."""
    before = (0, GUESSING)
    for updates in sorted({row.update for rows in trainings for row in rows}):
        values = [row.accuracy for rows in trainings for row in rows if row.update == updates]
        now = (updates, statistics.mean(values))
        if now[1] >= accuracy:
            share = (accuracy - before[1]) / (now[1] - before[1]) if now[1] > before[1] else 1.0
            return (before[0] + share * (now[0] - before[0])) * iteration_s
        before = now
    return None
