"""Folders for runs that were not given one: runs/001, runs/002 and so on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quorate.errors import BadInput

RUNS = Path("runs")


@contextmanager
def folder_for_run(given: Path | None) -> Iterator[Path]:
    """The folder that was given, or the next number in runs/, which goes again if nothing was put into it."""
    if given is not None:
        yield given
        return
    folder = _next_folder()
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty: there is something to keep
            folder.rmdir()
            RUNS.rmdir()


def _next_folder() -> Path:
    """Made at once, so that two commands started together do not get the same."""
    try:
        RUNS.mkdir(exist_ok=True)
        taken = [int(entry.name) for entry in RUNS.iterdir() if entry.name.isdecimal()]
        number = max(taken, default=0)
        while True:
            number += 1
            with suppress(FileExistsError):
                folder = RUNS / f"{number:03}"
                folder.mkdir()
                return folder
    except OSError as error:
        raise BadInput(f"no folder can be made in {str(RUNS)!r}: {error.strerror}; name one with --out") from error
