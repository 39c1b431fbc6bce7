"""A plan as a person reads it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from quorate.cli._show import byte_size, console, seconds

if TYPE_CHECKING:
    from rich.table import Table

    from quorate.planning import Plan, Split

_MOST_ROWS = 12


def print_plan(plan: Plan, every: bool) -> None:
    """The answer first, then what it is made of."""
    from rich.padding import Padding
    from rich.text import Text

    screen = console()
    say: Any = screen.print
    say(Text(answer(plan), style="bold"))
    say(Text(f"Why: {plan.recommendation.reason}."))
    if plan.recommendation.changes:
        say(Text(f"It would be {'; or '.join(plan.recommendation.changes)}."))
    for slow in plan.slow:
        say(Text(f"{slow.sentence()[0].upper()}{slow.sentence()[1:]}."))
    say()
    what = "left to finish" if plan.late == "finish" else "cancelled"
    say(Text(f"{plan.machines} machines, from {plan.source} ({plan.rounds:,} rounds), late work {what}"))
    say(Text(plan.effort.sentence), style="dim")
    _print_wide(_splits(plan, every))
    if plan.others:
        say()
        say(Text("Other policies, simulated in the same world"))
        _print_wide(_others(plan))
    if plan.fits:
        say()
        fits = ", ".join(f"{_rounded(fit.text)} ({fit.distance:.3f})" for fit in plan.fits)
        say(Text(f"Fits to all times, with their distance (Kolmogorov and Smirnov's): {fits}"), style="dim")
    for note in plan.notes:
        say(Text(f"Note: {note}."))
    for text, other in plan.what_if:
        say()
        say(Text(f"What if {text}: {answer(other)}", style="bold"))
        say(Padding(Text(f"{other.recommendation.reason}."), (0, 0, 0, 2)))
        for note in other.notes:
            if note not in plan.notes:
                say(Padding(Text(f"Note: {note}."), (0, 0, 0, 2)))


def answer(plan: Plan) -> str:
    """The recommendation in a sentence."""
    found = plan.recommendation
    split = f"{found.quorum}+{found.backups}"
    what = f"Take {split}" if found.backups else f"Take {split}, no backups"
    pace = f"{seconds(found.seconds_per_update)} an update"
    full = plan.splits[-1]
    if plan.effort.is_absolute:
        against = "" if found.speedup is None else f" against {_duration(full.time)} with {full.quorum}+0"
        pace += f", {_duration(found.time)} to the target{against}"
    if found.speedup is not None and found.backups:
        pace += f" (×{found.speedup:.2f})"
    elif found.speedup is None:
        endless = not math.isfinite(full.mean)
        pace += "; waiting for all has no finite mean" if endless else "; how long all of them take was not seen"
    return f"{what}: {pace}."


def _splits(plan: Plan, every: bool) -> Table:
    table = _table("", "N+b", "mean", "±", "median", "p99", "updates", "time", "wasted", "bytes an update")
    shown = plan.splits if every else _telling(plan)
    best = plan.recommendation.time
    for split in reversed(shown):
        mine = split.quorum == plan.recommendation.quorum
        table.add_row(
            "▶" if mine else "",
            f"{split.quorum}+{split.backups}",
            _maybe(split.mean),
            _spread(split),
            seconds(split.median),
            seconds(split.p99),
            f"×{split.updates:.3g}",
            _duration(split.time) if plan.effort.is_absolute else _times(split.time / best),
            f"{split.wasted:.0%}",
            "–" if split.bytes is None else byte_size(split.bytes),
            style="bold" if mine else None,
        )
    return table


def _telling(plan: Plan) -> list[Split]:
    """The chosen split and its neighbours, the ends, and some between."""
    splits = plan.splits
    if len(splits) <= _MOST_ROWS:
        return list(splits)
    place, last = plan.recommendation.quorum - 1, len(splits) - 1
    wanted = {0, last, *(place + step for step in (-2, -1, 0, 1, 2))}
    wanted |= {round(last * share) for share in (0.25, 0.5, 0.75, 0.9, 0.95)}
    return [splits[index] for index in sorted(wanted) if 0 <= index <= last]


def _others(plan: Plan) -> Table:
    table = _table("", "policy", "an update", "gradients", "staleness", "updates", "time", "wasted")
    for one in plan.others:
        at_least = "≥ " if one.is_lower_bound else ""
        time = _duration(one.time) if plan.effort.is_absolute else _times(one.time / plan.recommendation.time)
        table.add_row(
            "",
            one.label,
            seconds(one.seconds_per_update),
            f"{one.gradients:.3g}",
            f"{one.staleness:.3g}",
            f"{at_least}×{one.updates:.3g}",
            f"{at_least}{time}",
            f"{one.wasted:.0%}",
        )
    if any(one.is_lower_bound for one in plan.others):
        table.caption = "≥: what staleness costs in updates is not in it"
        table.caption_justify = "left"
    return table


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    return table


def _print_wide(table: Table) -> None:
    """Better a line that is too long than a number that is cut off."""
    screen = console()
    needed = console(width=1000).measure(table).maximum
    console(width=max(needed, screen.width)).print(table)


def _maybe(mean: float) -> str:
    return seconds(mean) if math.isfinite(mean) else "infinite"


def _spread(split: Split) -> str:
    if not math.isfinite(split.mean) or not math.isfinite(split.high):
        return "–"
    return f"{(split.high - split.low) / 2 / split.mean:.1%}" if split.high > split.low else "exact"


def _times(ratio: float) -> str:
    return f"×{ratio:.3g}" if math.isfinite(ratio) else "infinite"


def _duration(value: float) -> str:
    """Hours, where seconds would be too many."""
    if not math.isfinite(value):
        return "infinite"
    hours = value / 3600
    return seconds(value) if hours < 1 else f"{hours:.1f} h" if hours < 1000 else f"{hours:,.0f} h"


def _rounded(law: str) -> str:
    """A law's text with four digits a number, which is what a fit is worth."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.4g}", law)
