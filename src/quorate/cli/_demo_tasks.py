"""The digits at learning rates that suit stale gradients; names that a trace can record and a replay find.

Each rate is the best of five tried on seeds 0 to 4, by the time to 95 % test accuracy with 8 workers:
async 0.003, 0.005, 0.007, 0.01, 0.014; softsync of 6 gradients 0.01, 0.014, 0.02, 0.03, 0.04.
"""

from __future__ import annotations

from quorate.tasks.digits import Digits


class DigitsForAsync(Digits):
    """For gradients that are some seven versions old."""

    def __init__(self) -> None:
        super().__init__(lr=0.007)


class DigitsForSoftSync(Digits):
    """For averages of gradients that are a version or two old."""

    def __init__(self) -> None:
        super().__init__(lr=0.03)
