"""Processes of this machine, from /proc."""

from __future__ import annotations

from pathlib import Path


def descendants(of: int) -> set[int]:
    """The processes below one."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    while True:
        more = {one for one, parent in parents.items() if parent in found | {of}} - found
        if not more:
            return found
        found |= more
