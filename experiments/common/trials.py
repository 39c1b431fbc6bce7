"""Trials of an experiment, run side by side; what is finished is on disk, and a second call goes on from there.

A trial is a frozen dataclass of texts and numbers: it names itself. What it found is a list of rows (a NamedTuple of
texts and numbers). Both go into one CSV file, which is all that figures and tables are made of.
"""

from __future__ import annotations

import csv
import io
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import torch

from quorate.errors import BadInput, QuorateError

Trial = TypeVar("Trial")  # a frozen dataclass
Row = TypeVar("Row", bound=NamedTuple)

Found = dict[Trial, list[Row]]

#: So many trials may fail before nothing more is begun: one is a bad trial, several are a bad program.
_FAILURES = 3


class TrialsFailed(QuorateError, RuntimeError):  # noqa: N818 - it says what became of the trials
    """Some trials ended with an error; the others were run, and are kept."""


class Table(Generic[Trial, Row]):
    """The CSV file of an experiment: a line for every row, with the trial that it belongs to."""

    def __init__(self, file: Path, trial: type[Trial], row: type[Row]) -> None:
        self.file = file
        self._trial, self._row = trial, row
        hints = get_type_hints(trial)
        self._names = [field.name for field in fields(trial)]  # type: ignore[arg-type]
        self._trial_kinds = [hints[name] for name in self._names]
        self._row_kinds = [get_type_hints(row)[name] for name in row._fields]
        self._columns = [*self._names, *row._fields]
        kinds = zip(self._columns, [*self._trial_kinds, *self._row_kinds], strict=True)
        odd = [name for name, kind in kinds if kind not in (str, int, float, bool)]
        assert not odd, f"a table holds texts, numbers and yes or no, but not what {odd} are"

    def read(self) -> Found[Trial, Row]:
        """All trials there are with their rows, in the order in which they ended; a torn last one does not count."""
        found: Found[Trial, Row] = {}
        lines = csv.reader(io.StringIO(self._complete(), newline=""))
        if next(lines, self._columns) != self._columns:
            raise BadInput(f"{str(self.file)!r} has other columns than this experiment's table; give another folder")
        cut = len(self._names)
        for line in lines:
            try:
                values = dict(zip(self._names, _converted(self._trial_kinds, line[:cut]), strict=True))
                row = self._row(*_converted(self._row_kinds, line[cut:]))
            except ValueError as error:
                raise BadInput(
                    f"{str(self.file)!r} cannot be read in line {lines.line_num} ({error}); mend or remove that line"
                ) from error
            found.setdefault(self._trial(**values), []).append(row)
        return found

    def append(self, trial: Trial, rows: Sequence[Row]) -> list[Row]:
        """Add a finished trial; gives its rows as they will be read."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        complete = self._complete()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not complete:
            writer.writerow(self._columns)
        key = astuple(trial)  # type: ignore[call-overload]
        written = [[_written(value) for value in row] for row in rows]
        writer.writerows([*key, *row] for row in written)
        # All or nothing, whenever a kill comes: another file takes the place of this one.
        beside = self.file.with_name(f".{self.file.name}.new")
        beside.write_text(complete + text.getvalue(), newline="")
        beside.replace(self.file)
        return [self._row(*_converted(self._row_kinds, [str(value) for value in row])) for row in written]

    def _complete(self) -> str:
        """The file without a last line that has no end (of a copy that was cut short), and without all of its trial."""
        if not self.file.exists():
            return ""
        text = self.file.read_bytes().decode(errors="replace")
        end = text.rfind("\n") + 1
        torn, text = text[end:], text[:end]
        lines = [f"{line}\n" for line in text.split("\n")[:-1]]
        while torn and len(lines) > 1 and self._may_be_one_trial(lines[-1], torn):
            lines.pop()
        return "".join(lines)

    def _may_be_one_trial(self, line: str, torn: str) -> bool:
        """Whether a torn line can be of the same trial as a whole one."""
        whole = next(csv.reader([line]))[: len(self._names)]
        part = next(csv.reader([torn]))[: len(self._names)]
        return whole[: len(part) - 1] == part[:-1] and whole[len(part) - 1].startswith(part[-1])


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
    tell: is told of each trial that ended (default: a line on the screen).

    A trial that fails does not stop the others; at the end TrialsFailed says which one it was.
    """
    found = table.read()
    until = time.monotonic() + limit_s
    failed: dict[Trial, Exception] = {}
    with _Runner(train, processes) as runner:
        while True:
            for trial in wanted(found):
                if runner.is_full or len(failed) >= _FAILURES:
                    break
                if trial not in found and trial not in failed and time.monotonic() < until:
                    runner.begin(trial)
            if not runner.running:
                break
            for trial, outcome in runner.ended(until):
                if isinstance(outcome, Exception):
                    failed[trial] = outcome
                    print(f"FAILED {_shown(trial)}: {type(outcome).__name__}: {outcome}", flush=True)
                    continue
                assert outcome, f"{trial} gave no rows"
                found[trial] = table.append(trial, outcome)
                if tell is not None:
                    tell(trial, found[trial])
                else:
                    print(f"{len(found)} of {len(set(wanted(found)) | found.keys())}: {_shown(trial)}", flush=True)
            if time.monotonic() >= until and processes > 1:
                break
    if failed:
        trial, error = next(iter(failed.items()))
        raise TrialsFailed(
            f"{len(failed)} trial{'s' * (len(failed) > 1)} failed, the first was {_shown(trial)} "
            f"({type(error).__name__}: {error}); what else was run is kept, and the same command tries again"
        ) from error
    return all(trial in found for trial in wanted(found))


class _Runner(Generic[Trial, Row]):
    """Trials under way: one in this process, or several in others."""

    def __init__(self, train: Callable[[Trial], Sequence[Row]], processes: int) -> None:
        self._train, self._processes = train, processes
        self._pool: ProcessPoolExecutor | None = None
        self.running: dict[Any, Trial] = {}

    def __enter__(self) -> _Runner[Trial, Row]:
        if self._processes > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, mp_context=context, initializer=_begin_process)
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

    def ended(self, until: float) -> Iterator[tuple[Trial, Sequence[Row] | Exception]]:
        """What has come to an end, each with its rows or with what went wrong. What the user gave wrong is raised."""
        if self._pool is None:
            for key in list(self.running):
                yield self.running.pop(key), _outcome(partial(self._train, key))
            return
        left_s = None if until == math.inf else max(0.0, until - time.monotonic())
        futures: list[Future[Sequence[Row]]] = list(self.running)
        for future in wait(futures, timeout=left_s, return_when=FIRST_COMPLETED).done:
            yield self.running.pop(future), _outcome(future.result)


def _outcome(result: Callable[[], Sequence[Row]]) -> Sequence[Row] | Exception:
    try:
        return result()
    except BadInput:
        raise
    except BrokenProcessPool as error:
        raise BadInput(
            "a process that ran trials was killed, most likely for memory; the same command goes on, "
            "with fewer --processes it needs less"
        ) from error
    except Exception as error:
        return error


def _begin_process() -> None:
    """One thread each, since they share the cores; and Ctrl-C, which reaches all, is left to the first process."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _shown(trial: Any) -> str:
    return ", ".join(f"{field.name}={getattr(trial, field.name)}" for field in fields(trial))


def _converted(kinds: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    return [(text == "True") if kind is bool else kind(text) for kind, text in zip(kinds, texts, strict=True)]


def _written(value: Any) -> Any:
    """Six digits are more than any measure here has."""
    return f"{value:.6g}" if isinstance(value, float) else value
