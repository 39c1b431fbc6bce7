"""What the collective engine must reach, by contender and by how communication compares to computation."""

from __future__ import annotations

from typing import NamedTuple

Ratios = dict[str, float | None]  # "ddp", "blocking", "limit": the contender's iterations/s over theirs


class Floor(NamedTuple):
    over: str
    at_least: float


OURS = ("ours", "delayed1", "delayed2", "delayed3")
_EVERYWHERE = Floor("ddp", 0.95)
_WHERE_EQUAL = {
    "ours": (Floor("ddp", 1.1),),
    "delayed1": (Floor("ddp", 1.4), Floor("blocking", 1.7), Floor("limit", 0.9)),
}


def floors(contender: str, ratio: float | None) -> tuple[Floor, ...]:
    """The floors of a contender where communication is `ratio` times computation (None: no rate limit)."""
    if contender not in OURS:
        return ()
    special = _WHERE_EQUAL.get(contender, ()) if ratio == 1.0 else ()
    return special if any(floor.over == "ddp" for floor in special) else (_EVERYWHERE, *special)


def missed(contender: str, ratio: float | None, ratios: Ratios) -> list[str]:
    """The floors that were not reached, in words; one that could not be measured counts as not reached."""
    found = []
    for over, at_least in floors(contender, ratio):
        reached = ratios.get(over)
        if reached is None or reached < at_least:
            found.append(f"{'?' if reached is None else f'{reached:.2f}'} < {at_least:g}× {over}")
    return found
