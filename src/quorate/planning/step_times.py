"""Tables of step times (CSV with the columns step, worker, seconds), as `quorate.measure` and others write them."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from quorate.errors import BadInput

COLUMNS = ("step", "worker", "seconds")

# The first steps of a run compile, allocate and open files. Any that take this many times the worker's median go.
_WARM_UP_FACTOR = 3.0
_WARM_UP_MOST = 10
_SHORTEST_S, _LONGEST_S = 1e-12, 1e9  # what is beyond is no step's time
# A set of workers seen in a smaller share of steps is not a cluster of that size, but one with rows missing.
_REGULAR_SHARE = 0.05


@dataclass(frozen=True)
class StepTimes:
    """Seconds by step and worker, whole steps only, and what had to be left out to get there."""

    times: dict[int, dict[int, float]]  # step -> worker -> seconds; steps in order
    notes: list[str] = field(default_factory=list)

    @property
    def workers(self) -> list[int]:
        return sorted({worker for row in self.times.values() for worker in row})


def read_step_times(paths: Sequence[Path]) -> StepTimes:
    """Read one table, or the parts that every worker wrote for itself."""
    if not paths:
        raise BadInput("no file of step times is given; name one, such as times.csv")
    times: dict[int, dict[int, float]] = {}
    notes: list[str] = []
    for path in paths:
        for line, step, worker, seconds in _rows(path, notes):
            row = times.setdefault(step, {})
            if worker in row:
                raise BadInput(
                    f"{path}, line {line}: step {step} of worker {worker} was there before; "
                    f"give each run's file once, and one run at a time"
                )
            row[worker] = seconds
    names = ", ".join(str(path) for path in paths)
    if not times:
        raise BadInput(f"{names}: there is no step in it; rows look like 0,3,0.125 (step, worker, seconds)")
    workers = sorted({worker for row in times.values() for worker in row})
    if len(workers) == 1:
        raise BadInput(
            f"{names}: all rows are of worker {workers[0]}, and one worker waits for nobody; "
            f"give the times of all workers (several files may be named)"
        )
    times = {step: times[step] for step in sorted(times)}
    kept = _without_warm_up(_whole_steps(times, notes), notes)
    if not kept:
        raise BadInput(f"{names}: no step is left after warm-up; let the run go on for longer")
    return StepTimes(kept, notes)


def _rows(path: Path, notes: list[str]) -> Iterator[tuple[int, int, int, float]]:
    """Line number, step, worker and seconds of each row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{str(path)!r} is not a text file; give a CSV with the columns {', '.join(COLUMNS)}") from error
    lines = text.splitlines()
    if not any(map(str.strip, lines)):
        raise BadInput(f"{str(path)!r} is empty; give a CSV with the columns {', '.join(COLUMNS)}")
    if len(lines) > 1 and not text.endswith(("\n", "\r")):
        lines.pop()  # its last number may be cut, and still be a number
        notes.append(f"{path}: the last line has no end and was left out, since it may be cut")
    reader = csv.reader(lines, skipinitialspace=True)
    header: list[str] | None = None
    places: list[int] = []
    try:
        for cells in reader:
            if not any(map(str.strip, cells)):
                continue
            if header is None:
                header = [cell.strip().lower() for cell in cells]
                places = _places(path, header)
                continue
            if len(cells) <= max(places):
                raise BadInput(
                    f"{path}, line {reader.line_num}: only {len(cells)} cells, but the header has {len(header)}"
                )
            step, worker, seconds = (cells[place].strip() for place in places)
            where = f"{path}, line {reader.line_num}"
            yield (
                reader.line_num,
                _whole(where, "step", step),
                _whole(where, "worker", worker),
                _seconds(where, seconds),
            )
    except csv.Error as error:
        raise BadInput(f"{path}, line {reader.line_num}: not a line of a CSV file ({error})") from error


def _places(path: Path, header: list[str]) -> list[int]:
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise BadInput(
            f"{path}: column {' and '.join(missing)} is missing (there are: {', '.join(header)[:100]}); "
            f"the first line must name the columns {', '.join(COLUMNS)}, separated by commas"
        )
    return [header.index(name) for name in COLUMNS]


def _whole(where: str, name: str, text: str) -> int:
    try:
        value = float(text)
        if value >= 0 and value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise BadInput(f"{where}: {name} is {text!r}, but it must be a whole number, 0 or more")


def _seconds(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (_SHORTEST_S <= value <= _LONGEST_S):
        raise BadInput(f"{where}: seconds is {text!r}, but it must be a finite number above 0, at most {_LONGEST_S:g}")
    return value


def _whole_steps(times: dict[int, dict[int, float]], notes: list[str]) -> dict[int, dict[int, float]]:
    """Steps of every set of workers that was at work for a while; those with rows missing go."""
    sets = Counter(frozenset(row) for row in times.values())
    most = max(sets.values())
    regular = {
        workers
        for workers, steps in sets.items()
        if len(workers) > 1 and (steps == most or steps >= _REGULAR_SHARE * len(times))
    }
    if not regular:
        raise BadInput("no step has the times of two workers, so their order is not known; give all workers' files")
    kept = {step: row for step, row in times.items() if frozenset(row) in regular}
    if len(kept) < len(times):
        notes.append(
            f"{_steps(len(times) - len(kept))} left out, as rows of some workers are missing in {_them(times, kept)}"
        )
    if len({len(workers) for workers in regular}) > 1:
        counts = sorted({len(workers) for workers in regular})
        notes.append(f"the number of workers changes during the run: {', '.join(map(str, counts))}")
    return kept


def _without_warm_up(times: dict[int, dict[int, float]], notes: list[str]) -> dict[int, dict[int, float]]:
    by_worker: dict[int, list[float]] = {}
    for row in times.values():
        for worker, seconds in row.items():
            by_worker.setdefault(worker, []).append(seconds)
    usual = {worker: median(seconds) for worker, seconds in by_worker.items()}
    steps = list(times)
    trimmed = 0
    while trimmed < min(_WARM_UP_MOST, len(steps)):
        row = times[steps[trimmed]]
        if not any(seconds > _WARM_UP_FACTOR * usual[worker] for worker, seconds in row.items()):
            break
        trimmed += 1
    if trimmed:
        notes.append(f"the first {_steps(trimmed)} left out as warm-up (over {_WARM_UP_FACTOR:g} × a worker's median)")
    return {step: times[step] for step in steps[trimmed:]}


def _steps(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"


def _them(times: dict[int, dict[int, float]], kept: dict[int, dict[int, float]]) -> str:
    return "it" if len(times) - len(kept) == 1 else "them"
