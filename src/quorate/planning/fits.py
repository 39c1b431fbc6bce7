"""Latency laws fitted to measured times: to extrapolate to more machines, and to show in the plan."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from quorate.errors import BadInput
from quorate.latency import Independent, Lognormal, Pareto, ShiftedExponential
from quorate.planning.world import Floats

_MOST_TIMES = 4_000
_LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted law and how well it matches the measured times."""

    law: Independent
    distance: float  # Kolmogorov-Smirnov: the largest gap between the two distribution functions
    points: tuple[tuple[float, float, float], ...]  # (level, measured seconds, fitted seconds)

    @property
    def text(self) -> str:
        return self.law.text()


def fit_laws(seconds: Floats) -> list[Fit]:
    """Shifted exponential, lognormal and Pareto fitted by maximum likelihood; the closest first."""
    from scipy import stats  # type: ignore[import-untyped]

    times = np.sort(seconds.ravel())
    times = times[:: max(1, len(times) // _MOST_TIMES)]
    if times[-1] <= times[0] * (1.0 + 1e-9):
        return []  # all times are equal: there is nothing to fit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimiser warnings; `distance` shows how good the fit is
        shift, scale = stats.expon.fit(times)
        sigma, _, median = stats.lognorm.fit(times, floc=0)
        alpha, _, least = stats.pareto.fit(times, floc=0, fscale=times[0])
    laws: list[Independent] = []
    for make in (
        lambda: ShiftedExponential(float(shift), float(scale)),
        lambda: Lognormal(float(median), min(10.0, float(sigma))),
        lambda: Pareto(float(least), float(alpha)),
    ):
        try:
            laws.append(make())
        except BadInput:
            continue  # the times are too spread out for this law to have finite draws
    measured = list(zip(_LEVELS, np.quantile(times, _LEVELS).tolist(), strict=True))
    fits = [
        Fit(
            law=law,
            distance=_distance(law, times),
            points=tuple((level, seconds, law.quantile(level)) for level, seconds in measured),
        )
        for law in laws
    ]
    return sorted(fits, key=lambda fit: fit.distance)


def draws(law: Independent, shape: tuple[int, int], random: np.random.Generator) -> Floats:
    """Independent random times of this law."""
    match law:
        case ShiftedExponential():
            found = law.shift + random.exponential(law.exp_mean, shape)
        case Lognormal():
            found = random.lognormal(math.log(law.median), law.sigma, shape)
        case Pareto():
            found = law.scale * (1.0 - random.random(shape)) ** (-1.0 / law.alpha)
        case _:
            raise AssertionError(law)
    return np.asarray(found, dtype=np.float64)


def _distance(law: Independent, times: Floats) -> float:
    """Kolmogorov-Smirnov distance: the largest gap on either side of a step of the measured distribution."""
    count = len(times)
    levels = np.array([_level(law, float(seconds)) for seconds in times])
    steps = np.arange(count + 1) / count
    return float(max(np.max(steps[1:] - levels), np.max(levels - steps[:-1])))


def _level(law: Independent, seconds: float) -> float:
    """Distribution function: the share of draws that take at most `seconds`."""
    match law:
        case ShiftedExponential():
            return 1.0 - math.exp(-max(0.0, seconds - law.shift) / law.exp_mean)
        case Lognormal():
            return 0.5 * (1.0 + math.erf(math.log(seconds / law.median) / (max(law.sigma, 1e-12) * math.sqrt(2.0))))
        case Pareto():
            return 1.0 - math.pow(law.scale / max(seconds, law.scale), law.alpha)
    raise AssertionError(law)
