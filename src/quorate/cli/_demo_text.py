"""What the demo's numbers say, in sentences. Every clause follows from a number; none is written beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quorate.reporting.comparison import Row

if TYPE_CHECKING:
    from quorate.training import Until


def sentences(rows: Sequence[Row], target: Until, lr: float) -> list[str]:
    """Who was first, what staleness did, and what dropping cost."""
    by_name = {row.name: row for row in rows}
    full, backup = by_name["full-sync"], by_name["backup"]
    stale = [by_name["async"], by_name["softsync"]]
    gentle = [row for row in rows if row.name not in ("full-sync", "backup", "async", "softsync")]
    return [
        _first(rows, full, backup, f"{target.target:.0%} test accuracy"),
        _staleness(stale, gentle, lr),
        f"{backup.label} dropped {backup.dropped_share:.0%} of its tickets, and so {backup.wasted_share:.0%} of its "
        f"workers' time; under {full.label} they spent {full.waiting_share:.0%} of it waiting for the slowest.",
    ]


def _first(rows: Sequence[Row], full: Row, backup: Row, goal: str) -> str:
    winner = min((row for row in rows if row.time_to_target_s is not None), key=_time, default=None)
    if winner is None:
        return f"No policy reached {goal}."
    others = [f"{row.label} {_compared(row, winner)}" for row in (backup, full) if row is not winner]
    took = f"after {_time(winner):.1f} s of virtual time"
    return f"{winner.label} was the first to reach {goal}, {took}; {' and '.join(others)}."


def _compared(row: Row, winner: Row) -> str:
    if row.time_to_target_s is None:
        return "never did"
    return f"took {_time(row):.1f} s (×{_time(row) / _time(winner):.1f})"


def _staleness(stale: Sequence[Row], gentle: Sequence[Row], lr: float) -> str:
    same = " and ".join(f"{row.label} (mean staleness {row.staleness_mean:.1f}) {_fared(row)}" for row in stale)
    retried = " and ".join(f"{row.label} {_fared(row)}" for row in gentle)
    return (
        f"At the learning rate that suits full sync ({lr:g}), {same}. "
        f"At the best of five rates tried for each, {retried}."
    )


def _fared(row: Row) -> str:
    if row.broke_off is not None:
        return "diverged"
    if row.time_to_target_s is not None:
        return f"reached it in {_time(row):.1f} s"
    return "never reached it" + ("" if row.best is None else f" (best {row.best:.0%}, at the end {row.final:.0%})")


def _time(row: Row) -> float:
    assert row.time_to_target_s is not None
    return row.time_to_target_s
