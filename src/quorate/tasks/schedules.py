"""How a learning rate goes over a training, as a share of the one that was given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quorate.errors import BadInput, check_at_least


@dataclass(frozen=True)
class RiseAndCosine:
    """Rises over the first `warm_up_share` of `updates`, then falls to `floor` along a cosine; None: stays at 1."""

    updates: int | None
    warm_up_share: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.updates is not None:
            check_at_least("updates", self.updates, 1)
        if not 0 <= self.warm_up_share < 1:
            raise BadInput(
                f"warm_up_share is {self.warm_up_share}, but a share of the training is at least 0 and below 1"
            )

    def __call__(self, version: int) -> float:
        """Of the next update, after so many."""
        if self.updates is None:
            return 1.0
        warm_up = self.updates * self.warm_up_share
        if version < warm_up:
            return (version + 1) / (warm_up + 1)
        done = min(1.0, (version - warm_up) / (self.updates - warm_up))
        return self.floor + (1 - self.floor) / 2 * (1 + math.cos(math.pi * done))
