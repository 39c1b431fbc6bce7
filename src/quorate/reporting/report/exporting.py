"""The figures of a report as files: a PNG and a CSV each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quorate.errors import BadInput
from quorate.reporting.report.drawing import draw
from quorate.reporting.report.tables import tables


def check_free(folder: Path, names: Sequence[str]) -> None:
    """Refuse to replace figures of these names."""
    for name in names:
        for file in (folder / f"{name}.csv", folder / f"{name}.png"):
            if file.exists():
                raise BadInput(f"{str(file)!r} is there already; name another folder, or add --overwrite")


def write_figures(data: dict[str, Any], folder: Path, overwrite: bool) -> list[Path]:
    """Write them all, and give the files. Nothing is replaced unless that was asked for."""
    found = list(tables(data))
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not overwrite:
            check_free(folder, [table.name for table in found])
        for table in found:
            numbers, picture = folder / f"{table.name}.csv", folder / f"{table.name}.png"
            with numbers.open("w", encoding="utf-8", newline="") as opened:
                writer = csv.writer(opened, lineterminator="\n")
                writer.writerow(table.columns)
                writer.writerows(table.rows)
            draw(data, table, picture)
            written += [numbers, picture]
    except OSError as error:
        raise BadInput(f"the folder {str(folder)!r} cannot be written: {error.strerror}; name another") from error
    return written
