"""The mean time until the k-th of n arrivals, which is the duration of a round that waits for k of n workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

from quorate.errors import BadInput
from quorate.latency.base import Independent, Latency
from quorate.latency.chen2016 import WORKERS, Chen2016
from quorate.latency.laws import Pareto, ShiftedExponential

# Limit of x in `integral_mean`: beyond it, the smaller of u and 1-u is no longer a normal float.
_FAR = 700.0
_NODES = 12


def order_statistic_mean(latency: Latency, n: int, k: int) -> float:
    """Mean seconds until the k-th of n workers finishes, if all start together; math.inf where infinite.

    For models with independent draws, and for `Chen2016` up to its 100 workers. Other models must be simulated.
    """
    if not 1 <= k <= n:
        raise BadInput(f"the {k}-th of {n} arrivals does not exist; give a k from 1 to n")
    match latency:
        case ShiftedExponential():
            return shifted_exponential_mean(latency.shift, latency.exp_mean, n, k)
        case Pareto():
            return pareto_mean(latency.scale, latency.alpha, n, k)
        case Independent():
            return integral_mean(latency, n, k)
        case Chen2016() if n <= WORKERS:
            return _subset_mean(latency, n, k)
    raise BadInput(
        f"{latency.text()} with {n} workers has no formula for the {k}-th arrival, as its draws are not "
        "independent and alike; simulate it"
    )


def shifted_exponential_mean(shift: float, exp_mean: float, n: int, k: int) -> float:
    """Δ + (H_n − H_{n−k})/μ: after i arrivals, the next arrives at the rate (n−i)μ."""
    return shift + exp_mean * math.fsum(1.0 / i for i in range(n - k + 1, n + 1))


def pareto_mean(scale: float, alpha: float, n: int, k: int) -> float:
    """x_m Γ(n+1) Γ(b+1−1/α) / (Γ(b+1) Γ(n+1−1/α)) with b = n−k, finite iff α > 1/(b+1)."""
    b, power = n - k, 1.0 / alpha
    if b + 1 <= power:
        return math.inf
    return scale * math.exp(
        math.lgamma(n + 1) + math.lgamma(b + 1 - power) - math.lgamma(b + 1) - math.lgamma(n + 1 - power)
    )


def integral_mean(law: Independent, n: int, k: int) -> float:
    """∫₀¹ Q(u) · n!/((k−1)! b!) · u^(k−1) (1−u)^b du with b = n−k, for a law whose integral is finite.

    The integration variable is x = ln(u/(1−u)): a heavy tail then falls off exponentially instead of ending in a
    pole, and the probabilities near 0 and near 1 are both exact.
    """
    b = n - k
    ln_count = math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(b + 1)
    lower, upper = law.inverse(), law.upper_inverse()

    def integrand(x: float) -> float:
        small = math.exp(-abs(x))
        ln_big = -math.log1p(small)
        ln_small = ln_big - abs(x)
        ln_u, ln_v = (ln_small, ln_big) if x < 0.0 else (ln_big, ln_small)
        density = math.exp(ln_count + k * ln_u + (b + 1) * ln_v)
        # Far out a power tail overflows; there the density of a finite integral is already 0.
        return density and density * (lower if x < 0.0 else upper)(small / (1.0 + small))

    # First panels: around the bulk, whose width in x is known, and split at the kinks.
    centre, width = math.log(k / (b + 1)), math.sqrt((n + 1) / (k * (b + 1)))
    cuts = {centre + width * i for i in (-64, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 64)}
    cuts |= {math.log(level / (1.0 - level)) for level in law.kinks()}
    return _integrate(integrand, [-_FAR, *sorted(x for x in cuts if -_FAR < x < _FAR), _FAR])


def _subset_mean(latency: Chen2016, n: int, k: int) -> float:
    """Sum over the rank r of the k-th of n workers among all 100, which needs k−1 of the n below r."""
    total = math.comb(WORKERS, n)
    return math.fsum(
        math.comb(r - 1, k - 1) * math.comb(WORKERS - r, n - k) / total * latency.mean_time_to(r)
        for r in range(k, WORKERS - n + k + 1)
    )


def _integrate(f: Callable[[float], float], cuts: list[float]) -> float:
    """∫f for f ≥ 0. Panels are halved until that changes their area by less than the tolerance."""
    panels = [(low, high, _panel(f, low, high)) for low, high in pairwise(cuts)]
    tolerance = 1e-8 * math.fsum(area for _, _, area in panels)
    done: list[float] = []
    while panels:
        low, high, area = panels.pop()
        middle = (low + high) / 2
        left, right = _panel(f, low, middle), _panel(f, middle, high)
        if abs(left + right - area) <= tolerance or not low < middle < high:
            done.append(left + right)
        else:
            panels += [(low, middle, left), (middle, high, right)]
    return math.fsum(done)


def _panel(f: Callable[[float], float], low: float, high: float) -> float:
    centre, half = (low + high) / 2, (high - low) / 2
    return half * math.fsum(weight * f(centre + half * x) for x, weight in _gauss_legendre(_NODES))


@cache
def _gauss_legendre(count: int) -> list[tuple[float, float]]:
    """Nodes and weights on (−1, 1), by Newton's method on the Legendre polynomial from the usual first guess."""
    rule = []
    for i in range(count):
        x = math.cos(math.pi * (i + 0.75) / (count + 0.5))
        for _ in range(10):
            before, value = 1.0, x
            for degree in range(2, count + 1):
                before, value = value, ((2 * degree - 1) * x * value - (degree - 1) * before) / degree
            slope = count * (x * value - before) / (x * x - 1.0)
            x -= value / slope
        rule.append((x, 2.0 / ((1.0 - x * x) * slope * slope)))
    return rule
