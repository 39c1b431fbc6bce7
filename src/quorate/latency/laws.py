"""Distributions with independent draws: each ticket's time is the quantile Q(u) of its own uniform u."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import NormalDist
from typing import ClassVar

from quorate.errors import BadInput
from quorate.latency.base import Draw, Independent, check_number, number_text, numbers_text


@dataclass(frozen=True)
class _NumbersOnly(Independent):
    """A distribution whose text form is its name and its fields, which are numbers."""

    def text(self) -> str:
        return f"{self.name}:{numbers_text(*(getattr(self, field.name) for field in fields(self)))}"


@dataclass(frozen=True)
class Constant(_NumbersOnly):
    """Every ticket takes the same time."""

    name: ClassVar[str] = "constant"
    form: ClassVar[str] = "constant:SECONDS"
    example: ClassVar[str] = "constant:0.05"
    seconds: float

    def __post_init__(self) -> None:
        check_number(Constant, "seconds", self.seconds, above=True)

    def inverse(self) -> Callable[[float], float]:
        seconds = float(self.seconds)
        return lambda _u: seconds

    def sampler(self, seed: int, workers: int) -> Draw:
        seconds = float(self.seconds)
        return lambda _worker, _step, _row, _time_s: seconds

    def mean(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class ShiftedExponential(_NumbersOnly):
    """A fixed part plus an exponential part: the classic distribution of mild stragglers."""

    name: ClassVar[str] = "shifted-exp"
    form: ClassVar[str] = "shifted-exp:SHIFT_S,MEAN_S"
    example: ClassVar[str] = "shifted-exp:0.05,0.025"
    shift: float
    exp_mean: float  # mean of the exponential part alone; `mean()` includes the shift

    def __post_init__(self) -> None:
        check_number(ShiftedExponential, "shift", self.shift)
        check_number(ShiftedExponential, "exp_mean", self.exp_mean, above=True)
        self.refuse_endless()

    def inverse(self) -> Callable[[float], float]:
        shift, exp_mean, log1p = self.shift, self.exp_mean, math.log1p
        return lambda u: shift - exp_mean * log1p(-u)

    def upper_inverse(self) -> Callable[[float], float]:
        shift, exp_mean, log = self.shift, self.exp_mean, math.log
        return lambda v: shift - exp_mean * log(v)

    def mean(self) -> float:
        return self.shift + self.exp_mean


@dataclass(frozen=True)
class Lognormal(_NumbersOnly):
    """The logarithm of the time is normal, with mean ln(median) and standard deviation sigma."""

    name: ClassVar[str] = "lognormal"
    form: ClassVar[str] = "lognormal:MEDIAN_S,SIGMA"
    example: ClassVar[str] = "lognormal:0.05,0.4"
    median: float
    sigma: float

    def __post_init__(self) -> None:
        check_number(Lognormal, "median", self.median, above=True)
        # At sigma 10 one ticket in six already takes 20,000 times the median; with a larger sigma integrals overflow.
        check_number(Lognormal, "sigma", self.sigma, most=10.0)
        self.refuse_endless()

    def inverse(self) -> Callable[[float], float]:
        median, sigma, exp, normal = self.median, self.sigma, math.exp, NormalDist().inv_cdf
        return lambda u: median * exp(sigma * normal(u))

    def upper_inverse(self) -> Callable[[float], float]:
        median, sigma, exp, normal = self.median, self.sigma, math.exp, NormalDist().inv_cdf
        return lambda v: median * exp(-sigma * normal(v))

    def mean(self) -> float:
        return self.median * math.exp(0.5 * self.sigma**2)


@dataclass(frozen=True)
class Pareto(_NumbersOnly):
    """A power tail: P(time > t) = (scale/t)^alpha. The mean is infinite for alpha <= 1."""

    name: ClassVar[str] = "pareto"
    form: ClassVar[str] = "pareto:SCALE_S,ALPHA"
    example: ClassVar[str] = "pareto:0.05,2.5"
    scale: float
    alpha: float

    def __post_init__(self) -> None:
        check_number(Pareto, "scale", self.scale, above=True)
        check_number(Pareto, "alpha", self.alpha, above=True)
        self.refuse_endless()

    def inverse(self) -> Callable[[float], float]:
        scale, power = self.scale, -1.0 / self.alpha
        return lambda u: scale * (1.0 - u) ** power

    def upper_inverse(self) -> Callable[[float], float]:
        scale, power = self.scale, -1.0 / self.alpha
        return lambda v: scale * v**power

    def mean(self) -> float:
        return self.scale * self.alpha / (self.alpha - 1.0) if self.alpha > 1.0 else math.inf


@dataclass(frozen=True)
class Quantiles(Independent):
    """Measured quantiles, as points (seconds, level), interpolated linearly."""

    name: ClassVar[str] = "quantiles"
    form: ClassVar[str] = "quantiles:SECONDS@LEVEL,SECONDS@LEVEL,…"
    example: ClassVar[str] = "quantiles:0.05@0,0.06@0.5,0.2@1"
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple((seconds, level) for seconds, level in self.points)
        object.__setattr__(self, "points", points)
        for seconds, level in points:
            check_number(Quantiles, f"seconds at level {level!r}", seconds, above=True)
            check_number(Quantiles, f"level of {seconds!r} seconds", level, most=1.0)
        if len(points) < 2 or points[0][1] != 0 or points[-1][1] != 1:
            raise BadInput(
                f"quantiles at levels {[level for _, level in points]} do not reach from 0 to 1; begin with "
                f"the shortest time at level 0 and end with the longest at level 1, as in {self.example}"
            )
        for (low_s, low), (high_s, high) in pairwise(points):
            if low >= high or low_s > high_s:
                raise BadInput(
                    f"quantile {number_text(high_s)}@{number_text(high)} follows {number_text(low_s)}@"
                    f"{number_text(low)}, but levels must rise and times not fall; sort the points by level"
                )

    def inverse(self) -> Callable[[float], float]:
        seconds, levels = zip(*self.points, strict=True)
        slopes = [(high_s - low_s) / (high - low) for (low_s, low), (high_s, high) in pairwise(self.points)]
        inner = levels[1:-1]

        def inverse(u: float) -> float:
            i = bisect_right(inner, u)
            return seconds[i] + (u - levels[i]) * slopes[i]  # type: ignore[no-any-return]

        return inverse

    def kinks(self) -> tuple[float, ...]:
        return tuple(level for _, level in self.points[1:-1])

    def mean(self) -> float:
        pairs = pairwise(self.points)
        return math.fsum((high - low) * (low_s + high_s) / 2 for (low_s, low), (high_s, high) in pairs)

    def text(self) -> str:
        return "quantiles:" + ",".join(f"{number_text(s)}@{number_text(level)}" for s, level in self.points)


@dataclass(frozen=True)
class Pause(_NumbersOnly):
    """Every ticket takes the same time, but with some probability `factor` times as long."""

    name: ClassVar[str] = "pause"
    form: ClassVar[str] = "pause:BASE_S,PROBABILITY,FACTOR"
    example: ClassVar[str] = "pause:0.05,0.04,10"
    base: float
    probability: float
    factor: float

    def __post_init__(self) -> None:
        check_number(Pause, "base", self.base, above=True)
        check_number(Pause, "probability", self.probability, most=1.0)
        check_number(Pause, "factor", self.factor, least=1.0)
        self.refuse_endless()

    def inverse(self) -> Callable[[float], float]:
        base, paused, smooth = float(self.base), float(self.base * self.factor), 1.0 - self.probability
        return lambda u: base if u < smooth else paused

    def kinks(self) -> tuple[float, ...]:
        smooth = 1.0 - self.probability
        return (smooth,) if 0.0 < smooth < 1.0 else ()

    def mean(self) -> float:
        return self.base * (1.0 + self.probability * (self.factor - 1.0))

    def longest(self) -> float:
        return self.base * self.factor
