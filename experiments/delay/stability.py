"""How high a learning rate may be before a delayed step overshoots for good, on a bowl of curvature h.

    python -m experiments.delay.stability

The bowl is the loss h·w²/2. With gradients of `delay` versions ago and Nesterov's momentum m, torch's SGD makes
v ← m·v + h·w(t−delay) and w ← w − rate·(h·w(t−delay) + m·v): a linear map of the last versions and v. It is stable
while all its eigenvalues are below 1. Without momentum the limit is 2·sin(π/(2·(2·delay+1)))/h.
"""

from __future__ import annotations

from experiments.delay.settings import DELAYS, LOWER_MOMENTUM, MOMENTUM


def highest_rate(delay: int, momentum: float) -> float:
    """The limit of rate·h, to four digits."""
    low, high = 1e-6, 8.0
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _radius(delay, momentum, middle) < 1 else (low, middle)
    return low


def _radius(delay: int, momentum: float, rate: float) -> float:
    import numpy as np

    step = np.zeros((delay + 2, delay + 2))  # of w(t), …, w(t−delay) and rate·v
    step[0, 0] = 1.0
    step[0, delay] -= rate * (1 + momentum)
    step[0, -1] = -momentum * momentum
    for older in range(1, delay + 1):
        step[older, older - 1] = 1.0
    step[-1, delay] = rate
    step[-1, -1] = momentum
    return float(np.abs(np.linalg.eigvals(step)).max())


def main() -> None:
    """Print the limits, and those of rate/(1 − momentum), which says how far a step goes in the end."""
    print("| delay | momentum | rate·h | rate·h/(1 − momentum) | times lower than without a delay |")
    print("|---|---|---|---|---|")
    for delay in DELAYS:
        for momentum in (MOMENTUM, LOWER_MOMENTUM, 0.0):
            limit = highest_rate(delay, momentum)
            lower = highest_rate(0, momentum) / limit
            print(f"| {delay} | {momentum:g} | {limit:.3f} | {limit / (1 - momentum):.2f} | {lower:.1f} |")


if __name__ == "__main__":
    main()
