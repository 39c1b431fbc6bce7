"""What runs are called and coloured, so that any two of a report can be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quorate.reporting.comparison import policy_label
from quorate.reporting.figures import COLOURS
from quorate.trace import TRACE_FILE


def run_folder(path: Path) -> Path:
    """The folder that a run is in, whether it or its trace was named."""
    return path.parent if path.name == TRACE_FILE else path


def labels(headers: Sequence[dict[str, Any]], paths: Sequence[Path]) -> list[str]:
    """One a run, no two alike: the policy, and where that is not enough the folder, and then all of its path."""
    plain = [policy_label(header["policy"], header["workers"]) for header in headers]
    folders = [run_folder(path) for path in paths]
    short = [f"{label} ({folder.resolve().name})" for label, folder in zip(plain, folders, strict=True)]
    long = [f"{label} ({path})" for label, path in zip(plain, paths, strict=True)]
    return [
        label if plain.count(label) == 1 else named if short.count(named) == 1 else full
        for label, named, full in zip(plain, short, long, strict=True)
    ]


def colours(headers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A policy has its own colour; a second run of it takes one that is free, and dashes when none is left."""
    wanted = [COLOURS.get(header["policy"]["name"]) for header in headers]
    palette = list(dict.fromkeys(COLOURS.values()))
    taken: set[str] = set()
    looks: list[dict[str, Any]] = []
    for index, own in enumerate(wanted):
        if own is not None and own not in taken:
            colour, dashed = own, False
        else:
            reserved = taken | {later for later in wanted[index + 1 :] if later is not None}
            free = [one for one in palette if one not in reserved] or [one for one in palette if one not in taken]
            colour, dashed = (free[0], False) if free else (palette[index % len(palette)], True)
        taken.add(colour)
        looks.append({"colour": colour, "dashed": dashed})
    return looks
