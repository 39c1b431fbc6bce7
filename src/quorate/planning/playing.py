"""A world as a latency model, so that any policy can be simulated in it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from quorate.latency.base import Draw, Latency
from quorate.planning.world import World
from quorate.seeds import derive, uniform


@dataclass(frozen=True, eq=False)
class Played(Latency):
    """Rounds of a world, in random order within a stretch; stretches go by the clock. A round stays together."""

    name: ClassVar[str] = "world"
    form: ClassVar[str] = "world"
    example: ClassVar[str] = "world"
    world: World
    rows: list[list[float]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.world.seconds.tolist())

    def sampler(self, seed: int, workers: int) -> Draw:
        assert workers == self.world.machines
        rows = self.rows
        begins = [regime.start for regime in self.world.regimes]
        lengths = [regime.stop - regime.start for regime in self.world.regimes]
        until_s = np.cumsum([self.world.span_s[regime].sum() for regime in self.world.regimes]).tolist()
        total_s, last = until_s[-1], len(begins) - 1
        key = derive(seed, "planning.world")

        def draw(worker: int, _step: int, row: int, time_s: float) -> float:
            stretch = min(bisect_right(until_s, time_s % total_s), last) if last else 0
            seconds: float = rows[begins[stretch] + int(uniform(key, row) * lengths[stretch])][worker]
            return seconds

        return draw

    def mean(self) -> float:
        return float(self.world.seconds.mean())

    def longest(self) -> float:
        return float(self.world.seconds.max())

    def text(self) -> str:
        return f"world:{self.world.source}"
