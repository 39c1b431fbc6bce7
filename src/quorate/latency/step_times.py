"""Reader of step time tables: CSV with the columns step, worker, seconds, from `quorate.measure` or other tools."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from statistics import fmean, median

from quorate.errors import BadInput

COLUMNS = ("step", "worker", "seconds")
#: Further columns of quorate.measure. PHASES: the parts of the seconds. WAITING: the all-reduce, including the wait for
#: other processes. CORE_WAIT and CORES are equal in all rows of a process: the share of its time that it waited for a
#: core, and the number of cores per process on its machine.
PHASES = ("data", "forward", "backward", "optimizer")
WAITING, CORE_WAIT, CORES = "waiting", "core_wait", "cores"
MORE_COLUMNS = (*PHASES, WAITING, CORE_WAIT, CORES)

# The first steps of a run compile, allocate and open files. Those over this multiple of a worker's median are dropped.
_WARM_UP_FACTOR = 3.0
_WARM_UP_MOST = 10
_SHORTEST_S, _LONGEST_S = 1e-12, 1e9  # values outside cannot be step times
# A set of workers that occurs in a smaller share of the steps is a larger set with rows missing.
_REGULAR_SHARE = 0.05


@dataclass(frozen=True)
class StepTimes:
    """Seconds by step and worker. Steps with missing workers are left out."""

    times: dict[int, dict[int, float]]  # step -> worker -> seconds; steps in order
    notes: list[str] = field(default_factory=list)  # sentences about the rows that were left out
    more: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)  # column -> step -> worker -> value

    @property
    def workers(self) -> list[int]:
        return sorted({worker for row in self.times.values() for worker in row})

    def means(self, column: str) -> dict[int, float]:
        """Each worker's mean of one of `MORE_COLUMNS`; empty if the table has no such column."""
        by_worker: dict[int, list[float]] = {}
        for row in self.more.get(column, {}).values():
            for worker, value in row.items():
                by_worker.setdefault(worker, []).append(value)
        return {worker: fmean(values) for worker, values in by_worker.items()}


def is_table(path: Path) -> bool:
    """Whether a file is a CSV, by its name or its first line. The first line of a trace is a JSON object."""
    if path.suffix.lower() == ".csv":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(200).lstrip()
    return b"seconds" in head and not head.startswith(b"{")


def read_step_times(paths: Sequence[Path]) -> StepTimes:
    """Read one table, or the partial tables that the workers wrote."""
    if not paths:
        raise BadInput("no file of step times is given; name one, such as times.csv")
    times: dict[int, dict[int, float]] = {}
    more: dict[str, dict[int, dict[int, float]]] = {}
    notes: list[str] = []
    for path in paths:
        for line, step, worker, seconds, others in _rows(path, notes):
            row = times.setdefault(step, {})
            if worker in row:
                raise BadInput(
                    f"{path}, line {line}: step {step} of worker {worker} was there before; "
                    f"give each run's file once, and one run at a time"
                )
            row[worker] = seconds
            for name, value in others.items():
                more.setdefault(name, {}).setdefault(step, {})[worker] = value
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
    more = {name: {step: rows[step] for step in kept if step in rows} for name, rows in more.items()}
    return StepTimes(kept, notes, more)


def _rows(path: Path, notes: list[str]) -> Iterator[tuple[int, int, int, float, dict[str, float]]]:
    """Line number, step, worker, seconds and `MORE_COLUMNS` of each row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(
            f"{str(path)!r} cannot be read: {error.strerror}; check the path, or write one with quorate.measure in "
            f"your training script"
        ) from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{str(path)!r} is not a text file; give a CSV with the columns {', '.join(COLUMNS)}") from error
    lines = text.splitlines()
    if not any(map(str.strip, lines)):
        raise BadInput(f"{str(path)!r} is empty; give a CSV with the columns {', '.join(COLUMNS)}")
    if len(lines) > 1 and not text.endswith(("\n", "\r")):
        lines.pop()  # its last number may be truncated and still be a valid number
        notes.append(f"{path}: the last line has no end and was left out, since it may be cut")
    reader = csv.reader(lines, skipinitialspace=True)
    header: list[str] | None = None
    places: list[int] = []
    others: dict[str, int] = {}
    try:
        for cells in reader:
            if not any(map(str.strip, cells)):
                continue
            if header is None:
                header = [cell.strip().lower() for cell in cells]
                places = _places(path, header)
                others = {name: header.index(name) for name in MORE_COLUMNS if name in header}
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
                {name: value for name, place in others.items() if (value := _optional(cells, place)) is not None},
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


def _optional(cells: list[str], place: int) -> float | None:
    """The value of an optional column, which another tool may have filled with text; None if it is not a number."""
    try:
        value = float(cells[place])
    except (ValueError, IndexError):
        return None
    return value if 0.0 <= value <= _LONGEST_S else None


def _whole_steps(times: dict[int, dict[int, float]], notes: list[str]) -> dict[int, dict[int, float]]:
    """The steps of every set of workers that occurs regularly; steps with rows missing are dropped."""
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
    dropped = len(times) - len(kept)
    if dropped:
        which = "it" if dropped == 1 else "them"
        notes.append(f"{_steps(dropped)} left out, as rows of some workers are missing in {which}")
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

    def is_slow(row: dict[int, float]) -> bool:
        return any(seconds > _WARM_UP_FACTOR * usual[worker] for worker, seconds in row.items())

    trimmed = len(list(takewhile(is_slow, islice(times.values(), _WARM_UP_MOST))))
    if trimmed:
        notes.append(f"the first {_steps(trimmed)} left out as warm-up (over {_WARM_UP_FACTOR:g} × a worker's median)")
    return dict(list(times.items())[trimmed:])


def _steps(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"
