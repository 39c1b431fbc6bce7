"""The formulae of docs/theory.md, by the number they have there. n = quorum + b workers, times in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quorate.latency import order_statistic_mean
from quorate.latency.base import Independent
from quorate.latency.order_statistics import integral_mean, pareto_mean, shifted_exponential_mean

# ------------------------------------------------------------ what an update is made of


def slow_share_without_ledger(n: int, quorum: int, slow: float) -> float:
    """(2) Slow samples are a share `slow` of the data and always later than the others: their share of what is kept."""
    kept = 0.0
    for fast in range(n + 1):
        chance = math.comb(n, fast) * (1 - slow) ** fast * slow ** (n - fast)
        kept += chance * max(0, quorum - fast)
    return kept / quorum


def drops_until_pinned(drop_rate: float) -> int:
    """(4)"""
    return max(3, math.ceil(math.log(1e-6) / math.log(drop_rate)))


def variance_of_the_mean(sigma_sq: float, quorum: int, batch: int) -> float:
    """(5)"""
    return sigma_sq / (quorum * batch)


def rate_bound(f0: float, eta: float, smooth: float, sigma_sq: float, quorum: int, batch: int, updates: int) -> float:
    """(6)"""
    return 2 * f0 / (eta * updates) + eta * smooth * sigma_sq / (quorum * batch)


def updates_to_target(noise_scale: float, quorum: int, batch: int) -> float:
    """(7), in units of S_min"""
    return 1 + noise_scale / (quorum * batch)


def delay_limit(delay: int) -> float:
    """(9), times 1/L"""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


# ------------------------------------------------------------ seconds per update

kth_of_any_law = integral_mean  # (10)
kth_of_shifted_exponential = shifted_exponential_mean  # (11)
kth_of_pareto = pareto_mean  # (12)


def kth_of_lognormal(median_s: float, sigma: float, n: int, quorum: int) -> float:
    """(13), Blom's approximation"""
    from statistics import NormalDist

    return median_s * math.exp(sigma * NormalDist().inv_cdf((quorum - 0.375) / (n + 0.25)))


def kth_of_pauses(base_s: float, probability: float, factor: float, n: int, quorum: int) -> float:
    """(14)"""
    on_time = math.fsum(
        math.comb(n, paused) * probability**paused * (1 - probability) ** (n - paused)
        for paused in range(n - quorum + 1)
    )
    return base_s * (1 + (factor - 1) * (1 - on_time))


def left_to_finish_exponential(mean_s: float, n: int, quorum: int) -> float:
    """(15) The quorum-th of `quorum` exponential times and n − quorum sums of two."""

    def not_yet(t: float) -> float:
        fresh, late = 1 - math.exp(-t), 1 - math.exp(-t) * (1 + t)
        return math.fsum(
            _binomial(quorum, i, fresh) * _binomial(n - quorum, j, late)
            for i in range(quorum + 1)
            for j in range(n - quorum + 1)
            if i + j < quorum
        )

    step, t, total = 0.01, 0.0, 0.0  # Simpson
    while t < 40:
        total += step / 6 * (not_yet(t) + 4 * not_yet(t + step / 2) + not_yet(t + step))
        t += step
        if not_yet(t) < 1e-9:
            break
    return mean_s * total


def _binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def k_batch_exponential(k: int, mean_s: float, n: int) -> float:
    """(16)"""
    return k * mean_s / n


def arrivals_in_groups(gradients: int, mean_s: float, n: int) -> float:
    """(17) async: groups of one"""
    return gradients * mean_s / n


def staleness_in_groups(gradients: int, n: int) -> float:
    """(18)"""
    return (n - 1) / gradients


def deadline_seconds_exponential(shift_s: float, mean_s: float, limit_s: float, n: int) -> float:
    """(19) ∫₀ᵀ 1 − F(t)ⁿ dt for F = Δ + Exp"""
    steps = 20_000
    width = (limit_s - shift_s) / steps
    return shift_s + width * math.fsum(1 - (1 - math.exp(-(i + 0.5) * width / mean_s)) ** n for i in range(steps))


def deadline_gradients_exponential(shift_s: float, mean_s: float, limit_s: float, n: int) -> float:
    """(20)"""
    return n * (1 - math.exp(-(limit_s - shift_s) / mean_s))


def shared_slowness(share_of_time: float, factor: float) -> tuple[float, float]:
    """(21) Rounds in slow spells, as a share of all rounds, and the mean factor."""
    share_of_rounds = share_of_time / (share_of_time + (1 - share_of_time) * factor)
    return share_of_rounds, 1 + (factor - 1) * share_of_rounds


# ------------------------------------------------------------ choosing b, and what it costs


def best_quorum(kth_means: Sequence[float], noise_in_batches: float) -> int:
    """(22) m_N · (1 + B_noise/(N·B)) is least; math.inf: the noise-dominated limit, m_N/N."""

    def time(quorum: int) -> float:
        updates = 1 / quorum if math.isinf(noise_in_batches) else 1 + noise_in_batches / quorum
        return kth_means[quorum - 1] * updates

    return min(range(1, len(kth_means) + 1), key=time)


def best_share_of_backups(shift_over_mean: float) -> float:
    """(23) x in 1/x − 1 + ln x = Δμ"""
    low, high = 1e-12, 1.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        if 1 / middle - 1 + math.log(middle) > shift_over_mean:
            low = middle
        else:
            high = middle
    return low


def wasted_share(law: Independent, n: int, quorum: int) -> float:
    """(24)"""
    means = [order_statistic_mean(law, n, k) for k in range(1, quorum + 1)]
    late = (n - quorum) * means[-1]
    return late / (math.fsum(means) + late)


def bytes_per_update(n: int, quorum: int, model_bytes: int) -> int:
    """(25)"""
    return (n + quorum) * model_bytes
