"""What most experiments are: a table or two, each with trials that fill it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common.command import Options
from experiments.common.trials import Found, Table, run_trials
from quorate.errors import BadInput


class Study(NamedTuple):
    """A table, and `run_trials` for the rest. one_by_one: for trials that want the machine to themselves."""

    table: Table[Any, Any]
    wanted: Callable[[Found[Any, Any]], Iterable[Any]]
    train: Callable[[Any], Sequence[Any]]
    tell: Callable[[Any, Any], None] | None = None
    one_by_one: bool = False


def run_studies(options: Options, *studies: Study) -> bool:
    """One after the other, in one time limit; True when everything is there."""
    until = time.monotonic() + options.limit_s
    for study in studies:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        processes = 1 if study.one_by_one else options.processes
        if not run_trials(study.table, study.wanted, study.train, processes=processes, limit_s=left_s, tell=study.tell):
            return False
    return True


def read_all(name: str, folder: Path, *tables: Table[Any, Any]) -> list[Found[Any, Any]]:
    """What is in the tables of an experiment, by its name; each must have something."""
    found = [table.read() for table in tables]
    if not all(found):
        raise BadInput(f"there are no results in {str(folder)!r}; run first: python -m experiments.{name} run")
    return found
