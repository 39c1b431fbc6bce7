"""The gradient noise scale: the batch size in samples beyond which more samples help little.

B_noise = tr(Σ)/|G|², where G is the true gradient and Σ the covariance of one sample's gradient (McCandlish et
al., 2018, "An Empirical Model of Large-Batch Training"). Updates to a target ≈ S_min·(1 + B_noise/batch).
"""

from __future__ import annotations

import math
from typing import NamedTuple

#: Norms are measured on every 16th version and on the first 4, so that they cost next to nothing.
EVERY, FIRST = 16, 4

_MEMORY = 32  # measurements that the running means remember: the noise scale grows while training goes on
_ENOUGH = 4  # measurements before an estimate is given


class Norms(NamedTuple):
    """Squared norms of one gradient, and of the averaged gradient that it is part of."""

    first_sq: float
    first_samples: int
    mean_sq: float
    samples: int

    @property
    def is_usable(self) -> bool:
        """Whether they give two equations: there was more than one arrival, and no norm overflowed."""
        return self.samples > self.first_samples and math.isfinite(self.first_sq) and math.isfinite(self.mean_sq)


def is_measured(version: int, every: int = EVERY) -> bool:
    """Whether norms are measured on the update of this version; a replay measures the same updates."""
    return version % every == 0 or version < FIRST


def signal_and_noise(norms: Norms) -> tuple[float, float]:
    """Unbiased estimates of |G|² and tr(Σ) from one measurement; either may be negative.

    With B samples in one arrival and S in all of them, E‖g₁‖² = |G|² + tr(Σ)/B and E‖ḡ‖² = |G|² + tr(Σ)/S.
    """
    first_sq, one, mean_sq, all_of_them = norms
    signal = (all_of_them * mean_sq - one * first_sq) / (all_of_them - one)
    return signal, (first_sq - mean_sq) / (1 / one - 1 / all_of_them)


class NoiseScale:
    """The running estimate. A quotient of two estimates is biased, so each has a running mean of its own."""

    def __init__(self) -> None:
        self._count = 0
        self._signal = 0.0  # |G|²
        self._noise = 0.0  # tr(Σ)

    def add(self, norms: Norms) -> None:
        """Add one measurement, if it is usable."""
        if not norms.is_usable:
            return
        signal, noise = signal_and_noise(norms)
        self._count += 1
        share = 1 / min(self._count, _MEMORY)
        self._signal += share * (signal - self._signal)
        self._noise += share * (noise - self._noise)

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None while there are too few measurements or |G|² is not positive."""
        if self._count < _ENOUGH or self._signal <= 0:
            return None
        scale = max(0.0, self._noise) / self._signal
        return scale if math.isfinite(scale) else None

    def state(self) -> list[float]:
        """The running means, as JSON values."""
        return [self._count, self._signal, self._noise]

    def restore(self, state: list[float]) -> None:
        """Continue from a state that `state` gave."""
        count, self._signal, self._noise = state
        self._count = int(count)
