"""Modifiers of latency models: slow workers, pauses, slow spells that workers share, a switch to another model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from quorate.errors import BadInput
from quorate.latency.base import Draw, Latency, check_number, number_text, numbers_text
from quorate.seeds import derive, uniform


class Modifier(Latency):
    """Multiplies the times of another model. Modifiers stack; the innermost applies first."""

    model: Latency

    @property
    def depth(self) -> int:
        """Number of modifiers inside this one; it gives equal modifiers of one stack different random numbers."""
        return self.model.depth + 1 if isinstance(self.model, Modifier) else 0


@dataclass(frozen=True)
class Slow(Modifier):
    """Some workers always take `factor` times as long: an imbalance that backup workers do not cure."""

    name: ClassVar[str] = "slow"
    form: ClassVar[str] = "MODEL*slow:WORKER=FACTOR,WORKER=FACTOR,…"
    example: ClassVar[str] = "shifted-exp:0.05,0.025*slow:3=4,5=1.5"
    model: Latency
    factors: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.factors:
            raise BadInput(f"slow names no worker; {self.usage()}")
        for worker, factor in self.factors.items():
            if worker < 0:
                raise BadInput(f"slow names worker {worker!r}, but workers are numbered from 0; {self.usage()}")
            check_number(Slow, f"factor of worker {worker}", factor, above=True)
        object.__setattr__(self, "factors", dict(sorted(self.factors.items())))
        self.refuse_endless()

    def __hash__(self) -> int:  # a mapping has no hash
        return hash((self.model, tuple(self.factors.items())))

    def sampler(self, seed: int, workers: int) -> Draw:
        last = max(self.factors)
        if last >= workers:
            raise BadInput(
                f"slow names worker {last}, but the run has workers 0 to {workers - 1}; "
                f"name one of these or use at least {last + 1} workers"
            )
        inner = self.model.sampler(seed, workers)
        factors = [self.factors.get(worker, 1.0) for worker in range(workers)]
        return lambda worker, step, row, time_s: inner(worker, step, row, time_s) * factors[worker]

    def longest(self) -> float:
        return self.model.longest() * max(1.0, *self.factors.values())

    def text(self) -> str:
        pairs = ",".join(f"{worker}={number_text(factor)}" for worker, factor in self.factors.items())
        return f"{self.model.text()}*slow:{pairs}"


@dataclass(frozen=True)
class Pauses(Modifier):
    """Each ticket independently takes, with some probability, `factor` times as long."""

    name: ClassVar[str] = "pauses"
    form: ClassVar[str] = "MODEL*pauses:PROBABILITY,FACTOR"
    example: ClassVar[str] = "lognormal:0.05,0.4*pauses:0.05,10"
    model: Latency
    probability: float
    factor: float

    def __post_init__(self) -> None:
        check_number(Pauses, "probability", self.probability, most=1.0)
        check_number(Pauses, "factor", self.factor, least=1.0)
        self.refuse_endless()

    def sampler(self, seed: int, workers: int) -> Draw:
        inner = self.model.sampler(seed, workers)
        probability, factor = self.probability, self.factor
        keys = [derive(seed, "latency.pauses", self.depth, worker) for worker in range(workers)]

        def draw(worker: int, step: int, row: int, time_s: float) -> float:
            seconds = inner(worker, step, row, time_s)
            return seconds * factor if uniform(keys[worker], step) < probability else seconds

        return draw

    def mean(self) -> float | None:
        mean = self.model.mean()
        return None if mean is None else mean * (1.0 + self.probability * (self.factor - 1.0))

    def longest(self) -> float:
        return self.model.longest() * self.factor

    def text(self) -> str:
        return f"{self.model.text()}*pauses:{numbers_text(self.probability, self.factor)}"


@dataclass(frozen=True)
class Spells(Modifier):
    """Slow spells that workers share: one spell of `length_s` at a random time in every window of `every_s`.

    A ticket that starts in a spell takes `factor` times as long. A spell hits each worker with probability `share`,
    independently of earlier spells.
    """

    name: ClassVar[str] = "spells"
    form: ClassVar[str] = "MODEL*spells:EVERY_S,LENGTH_S,FACTOR[,SHARE]"
    example: ClassVar[str] = "constant:0.05*spells:60,5,3"
    model: Latency
    every_s: float
    length_s: float
    factor: float
    share: float = 1.0

    def __post_init__(self) -> None:
        check_number(Spells, "every_s", self.every_s, above=True)
        # At most one window long: spells never overlap, and only the spell of the current window can apply.
        check_number(Spells, "length_s", self.length_s, most=self.every_s)
        check_number(Spells, "factor", self.factor, least=1.0)
        check_number(Spells, "share", self.share, most=1.0)
        self.refuse_endless()

    def sampler(self, seed: int, workers: int) -> Draw:
        inner = self.model.sampler(seed, workers)
        every_s, length_s, factor, share = self.every_s, self.length_s, self.factor, self.share
        slack_s = every_s - length_s
        begins = derive(seed, "latency.spells", self.depth)
        hits = [derive(seed, "latency.spells.hit", self.depth, worker) for worker in range(workers)]

        def draw(worker: int, step: int, row: int, time_s: float) -> float:
            seconds = inner(worker, step, row, time_s)
            window, into_s = divmod(time_s, every_s)
            into_s -= slack_s * uniform(begins, int(window))
            if 0.0 <= into_s < length_s and (share == 1.0 or uniform(hits[worker], int(window)) < share):
                return seconds * factor
            return seconds

        return draw

    def longest(self) -> float:
        return self.model.longest() * self.factor

    def text(self) -> str:
        numbers = [self.every_s, self.length_s, self.factor] + ([] if self.share == 1.0 else [self.share])
        return f"{self.model.text()}*spells:{numbers_text(*numbers)}"


@dataclass(frozen=True)
class Changing(Latency):
    """`models[i]` applies to tickets that start before `times_s[i]`; the last model applies after the last time."""

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
        draws, times_s = [model.sampler(seed, workers) for model in self.models], self.times_s
        return lambda worker, step, row, time_s: draws[bisect_right(times_s, time_s)](worker, step, row, time_s)

    def longest(self) -> float:
        return max(model.longest() for model in self.models)

    def text(self) -> str:
        words = [self.models[0].text()]
        for time_s, model in zip(self.times_s, self.models[1:], strict=True):
            words += [number_text(time_s), model.text()]
        return "->".join(words)
