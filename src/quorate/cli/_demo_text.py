"""What the demo's numbers say, in sentences. Every clause follows from a number; none is written beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quorate.reporting.comparison import Row

if TYPE_CHECKING:
    from quorate.conditions import Until


class SameRate(NamedTuple):
    """A look at a stale policy at the learning rate of the synchronous ones, after a few epochs."""

    lr: float
    epochs: int
    full_accuracy: float
    stale: Row


def sentences(rows: Sequence[Row], target: Until, rates: dict[str, float], same_rate: SameRate) -> list[str]:
    """Who was first, what learning rates had to do with it, and what dropping cost."""
    by_name = {row.name: row for row in rows}
    full, backup = by_name["full-sync"], by_name["backup"]
    return [
        _first(rows, f"{target.target:.0%} test accuracy"),
        _rates(full, rates, same_rate),
        f"{backup.label} dropped {backup.dropped_share:.0%} of its tickets, and so {backup.wasted_share:.0%} of its "
        f"workers' time; under {full.label} they spent {full.waiting_share:.0%} of it waiting for the slowest.",
    ]


def _first(rows: Sequence[Row], goal: str) -> str:
    winner = min((row for row in rows if row.time_to_target_s is not None), key=_time, default=None)
    if winner is None:
        return f"No policy reached {goal}."
    others = ", ".join(f"{_short(row)} {_compared(row, winner)}" for row in rows if row is not winner)
    took = f"after {_time(winner):.1f} s"
    return f"{_short(winner)} was the first to reach {goal}, {took}; {others}."


def _compared(row: Row, winner: Row) -> str:
    if row.time_to_target_s is None:
        return "broke off" if row.broke_off else "never did"
    return f"took {_time(row):.1f} s (×{_time(row) / _time(winner):.1f})"


def _rates(full: Row, rates: dict[str, float], same: SameRate) -> str:
    stale = same.stale
    chosen = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return (
        f"Each ran at the learning rate that was best for it of those tried: {chosen}. "
        f"At {same.lr:g} and after {same.epochs} epochs, {full.label} is at {same.full_accuracy:.0%}, "
        f"{_short(stale)} {_accuracy(stale)}; its gradients were {stale.staleness_mean:.1f} versions old on average."
    )


def _accuracy(row: Row) -> str:
    return "broke off" if row.broke_off is not None or row.final is None else f"at {row.final:.0%}"


def _short(row: Row) -> str:
    return row.label.partition(",")[0]


def _time(row: Row) -> float:
    assert row.time_to_target_s is not None
    return row.time_to_target_s
