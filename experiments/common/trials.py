"""Trials of an experiment, run side by side; what is finished is on disk, and a second call goes on from there.

A trial is a frozen dataclass of texts and numbers: it names itself. What it found is a list of rows (a NamedTuple of
texts and numbers). Both go into one CSV file, which is all that figures and tables are made of.
"""

from __future__ import annotations

import csv
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from quorate.errors import BadInput

Trial = TypeVar("Trial")  # a frozen dataclass
Row = TypeVar("Row", bound=NamedTuple)

Found = dict[Trial, list[Row]]


class Table(Generic[Trial, Row]):
    """The CSV file of an experiment: a line for every row, with the trial that it belongs to."""

    def __init__(self, file: Path, trial: type[Trial], row: type[Row]) -> None:
        self.file = file
        self._trial, self._row = trial, row
        hints = get_type_hints(trial)
        self._trial_kinds = [hints[field.name] for field in fields(trial)]  # type: ignore[arg-type]
        self._row_kinds = [get_type_hints(row)[name] for name in row._fields]
        self._columns = [*(field.name for field in fields(trial)), *row._fields]  # type: ignore[arg-type]

    def read(self) -> Found[Trial, Row]:
        """All trials there are with their rows, in the order in which they ended; a torn last line does not count."""
        found: Found[Trial, Row] = {}
        if not self.file.exists():
            return found
        text = self.file.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        reader = csv.reader(lines)
        if next(reader, None) != self._columns:
            raise BadInput(f"{str(self.file)!r} has other columns than this experiment's table; give another folder")
        for line in reader:
            cut = len(self._trial_kinds)
            trial = self._trial(*_converted(self._trial_kinds, line[:cut]))
            found.setdefault(trial, []).append(self._row(*_converted(self._row_kinds, line[cut:])))
        return found

    def append(self, trial: Trial, rows: Sequence[Row]) -> None:
        """Add a finished trial."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.file.exists() or not self.file.stat().st_size
        with self.file.open("a", newline="") as opened:
            writer = csv.writer(opened, lineterminator="\n")
            if is_new:
                writer.writerow(self._columns)
            key = astuple(trial)  # type: ignore[call-overload]
            writer.writerows([*key, *(_written(value) for value in row)] for row in rows)


def run_trials(
    table: Table[Trial, Row],
    wanted: Callable[[Found[Trial, Row]], Iterable[Trial]],
    train: Callable[[Trial], Sequence[Row]],
    *,
    processes: int = 1,
    limit_s: float = math.inf,
    tell: Callable[[Trial, Sequence[Row]], None] | None = None,
) -> bool:
    """Run what is wanted and not yet in the table; True when everything is there.

    wanted: gives all trials, in the order in which to run them, from what is found so far; it is asked again after each
        trial, so what follows from a result (a tuned rate) is simply wanted from then on.
    train: runs one trial; with several processes it must be a function that another process can import.
    """
    found = table.read()
    until = time.monotonic() + limit_s
    with _Runner(train, processes) as runner:
        while True:
            for trial in wanted(found):
                if runner.is_full:
                    break
                if trial not in found and time.monotonic() < until:
                    runner.begin(trial)
            if not runner.running:
                return all(trial in found for trial in wanted(found))
            for trial, rows in runner.ended(until):
                if not rows:
                    raise BadInput(f"{trial} gave no rows")
                table.append(trial, rows)
                found[trial] = list(rows)
                if tell is not None:
                    tell(trial, rows)
            if time.monotonic() >= until and processes > 1:
                return all(trial in found for trial in wanted(found))


class _Runner(Generic[Trial, Row]):
    """Trials under way: one in this process, or several in others."""

    def __init__(self, train: Callable[[Trial], Sequence[Row]], processes: int) -> None:
        self._train, self._processes = train, processes
        self._pool: ProcessPoolExecutor | None = None
        self.running: dict[Any, Trial] = {}

    def __enter__(self) -> _Runner[Trial, Row]:
        if self._processes > 1:
            self._pool = ProcessPoolExecutor(self._processes, mp_context=multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        """End what is under way: a trial that is not finished is not kept."""
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
            self._pool.shutdown(cancel_futures=True)

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self._processes

    def begin(self, trial: Trial) -> None:
        if trial in self.running.values():
            return
        key: Any = trial if self._pool is None else self._pool.submit(self._train, trial)
        self.running[key] = trial

    def ended(self, until: float) -> Iterator[tuple[Trial, Sequence[Row]]]:
        if self._pool is None:
            for key in list(self.running):
                yield self.running[key], self._train(self.running.pop(key))
            return
        left_s = None if until == math.inf else max(0.0, until - time.monotonic())
        futures: list[Future[Sequence[Row]]] = list(self.running)
        for future in wait(futures, timeout=left_s, return_when=FIRST_COMPLETED).done:
            yield self.running.pop(future), future.result()


def _converted(kinds: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    return [(text == "True") if kind is bool else kind(text) for kind, text in zip(kinds, texts, strict=True)]


def _written(value: Any) -> Any:
    """Six digits are more than any measure here has."""
    return f"{value:.6g}" if isinstance(value, float) else value
