"""A cluster that changes while a run goes on: one model until a time, then another."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from quorate.errors import BadInput
from quorate.latency.base import Draw, Latency, check_number, number_text


@dataclass(frozen=True)
class Changing(Latency):
    """`models[i]` holds for tickets that start before `times_s[i]`, the last one for ever after."""

    name: ClassVar[str] = "a change"
    form: ClassVar[str] = "MODEL->SECONDS->MODEL"
    example: ClassVar[str] = "shifted-exp:0.05,0.002->60->pause:0.05,0.1,10"
    models: tuple[Latency, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.models) != len(self.times_s) + 1 or not self.times_s:
            raise BadInput(f"a change has one time between two models; {self.usage()}")
        before = 0.0
        for time_s in self.times_s:
            check_number(Changing, "time", time_s, above=True)
            if time_s <= before:
                raise BadInput(f"a change at {time_s:g} s comes after one at {before:g} s; times must rise")
            before = time_s

    def sampler(self, seed: int, workers: int) -> Draw:
        draws = [model.sampler(seed, workers) for model in self.models]
        times_s = self.times_s

        def draw(worker: int, step: int, row: int, time_s: float) -> float:
            return draws[bisect_right(times_s, time_s)](worker, step, row, time_s)

        return draw

    def mean(self) -> None:
        """None: how many tickets start before a change is the run's doing."""

    def longest(self) -> float:
        return max(model.longest() for model in self.models)

    def text(self) -> str:
        words = [self.models[0].text()]
        for time_s, model in zip(self.times_s, self.models[1:], strict=True):
            words += [number_text(time_s), model.text()]
        return "->".join(words)
