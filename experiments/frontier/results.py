"""From races to the map: the best of each family in a cell, who wins it, and by how much."""

from __future__ import annotations

import math
from typing import NamedTuple

from experiments.common.spread import Spread, spread_of
from experiments.common.to_target import Finish, chosen_in_tuning, finals, goodness
from experiments.common.trials import Found
from experiments.frontier.settings import FAMILIES, Trial

Cell = tuple[str, float, float, float]  # task, tail, spread, noise
SYNCHRONOUS, ASYNCHRONOUS = ("full-sync", "backup"), ("async", "softsync")


class Standing(NamedTuple):
    """The best of a family in one cell, chosen by its tuning; its seconds are those of other seeds."""

    family: str
    option: int
    lr: float
    seconds: Spread
    updates: Spread
    staleness: float
    drop_rate: float

    @property
    def label(self) -> str:
        if self.family == "backup":
            return f"{self.option} backups"
        if self.family == "softsync":
            return f"softsync of {self.option}"
        return self.family.replace("-", " ")


class Verdict(NamedTuple):
    """Who was first in a cell."""

    winner: Standing
    second: Standing
    ratio: float  # of seconds, the second over the first
    is_clear: bool  # the slowest seed of the winner is before the fastest of the second


def standings(found: Found[Trial, Finish], cell: Cell) -> dict[str, Standing]:
    """Of every family that was run in a cell."""
    rising = cell[0] != "bowl"
    placed: dict[str, Standing] = {}
    for family in FAMILIES:
        runs = [(trial, rows) for trial, rows in found.items() if trial.cell == cell and trial.family == family]
        if not runs:
            continue
        trial, rows = max(runs, key=lambda run: goodness(chosen_in_tuning(run[1], rising), rising))
        ends = finals(rows)
        placed[family] = Standing(
            family,
            trial.option,
            ends[0].lr,
            spread_of([end.seconds for end in ends]),
            spread_of([end.updates for end in ends]),
            spread_of([end.staleness for end in ends]).mean,
            spread_of([end.drop_rate for end in ends]).mean,
        )
    return placed


def verdict(placed: dict[str, Standing]) -> Verdict:
    """Who was first among these."""
    first, second, *_ = sorted(placed.values(), key=lambda one: one.seconds.mean)
    return Verdict(
        first, second, second.seconds.mean / first.seconds.mean, first.seconds.highest < second.seconds.lowest
    )


def async_over_sync(placed: dict[str, Standing]) -> float:
    """How many times as soon as the best synchronous method async is there; NaN where neither ever was."""
    sync_s = min(placed[family].seconds.mean for family in SYNCHRONOUS if family in placed)
    async_s = placed["async"].seconds.mean
    return sync_s / async_s if math.isfinite(sync_s) or math.isfinite(async_s) else math.nan


def cells_of(found: Found[Trial, Finish], task: str) -> list[Cell]:
    """Those of a task, in the order of the map."""
    return sorted({trial.cell for trial in found if trial.task == task}, key=lambda cell: (cell[3], cell[2], cell[1]))
