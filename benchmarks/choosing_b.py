"""python -m benchmarks.choosing_b: the tables of docs/choosing-b.md, N+b for common tails and sizes.

The k-th arrivals are exact where there is a formula or an integral (`quorate.latency.order_statistic_mean`) and
simulated for the measured cluster beyond its 100 workers.
"""

from __future__ import annotations

import math
from functools import cache

from benchmarks.theory.formulas import best_quorum
from benchmarks.theory.runs import kth_means
from quorate.errors import BadInput
from quorate.latency import order_statistic_mean, parse_latency

TAILS = {
    "no tail": "constant:1",
    "exponential, mild (1 + Exp 0.1)": "shifted-exp:1,0.1",
    "exponential, strong (1 + Exp 1)": "shifted-exp:1,1",
    "lognormal, s = 0.2": "lognormal:1,0.2",
    "lognormal, s = 0.5": "lognormal:1,0.5",
    "lognormal, s = 1": "lognormal:1,1",
    "Pareto, α = 2.5": "pareto:1,2.5",
    "Pareto, α = 1.5": "pareto:1,1.5",
    "pauses, 1 % × 10": "pause:1,0.01,10",
    "pauses, 5 % × 10": "pause:1,0.05,10",
    "100 GPUs, measured (`chen2016`)": "chen2016",
}
SIZES = (8, 16, 32, 64, 100, 256)
NOISES = {"noise-dominated": math.inf, "B_noise = 8 batches": 8.0}


@cache
def arrival_means(latency: str, n: int) -> tuple[float, ...]:
    """Mean time of the k-th of n arrivals, k = 1 … n."""
    law = parse_latency(latency)
    try:
        return tuple(order_statistic_mean(law, n, k) for k in range(1, n + 1))
    except BadInput:
        return tuple(kth_means(latency, n, 2000))


def choice(latency: str, n: int, noise_in_batches: float) -> tuple[int, int, float]:
    """Quorum, backups, and how many times sooner than with all n."""
    means = arrival_means(latency, n)
    quorum = best_quorum(means, noise_in_batches)

    def time(of: int) -> float:
        return means[of - 1] * (1 / of if math.isinf(noise_in_batches) else 1 + noise_in_batches / of)

    return quorum, n - quorum, time(n) / time(quorum)


def cell(latency: str, n: int, noise_in_batches: float) -> str:
    quorum, backups, gain = choice(latency, n, noise_in_batches)
    return f"{quorum}+{backups}" + (f" ×{gain:.2f}" if backups else "")


def table(noise_in_batches: float) -> str:
    lines = ["| one worker's times | " + " | ".join(map(str, SIZES)) + " |", "|---" * (len(SIZES) + 1) + "|"]
    for name, latency in TAILS.items():
        lines.append(f"| {name} | " + " | ".join(cell(latency, n, noise_in_batches) for n in SIZES) + " |")
    return "\n".join(lines)


def main() -> None:
    for name, noise in NOISES.items():
        print(f"{name}\n\n{table(noise)}\n")


if __name__ == "__main__":
    main()
