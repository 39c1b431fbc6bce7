"""Softsync (Zhang et al., 2016): an update whenever enough gradients have arrived, of any staleness."""

from __future__ import annotations

from quorate.errors import check_at_least
from quorate.policies._arrivals import ArrivalPolicy


class SoftSync(ArrivalPolicy):
    """Apply the mean of every `gradients` arrivals; nobody waits, nothing is dropped."""

    name = "softsync"
    parameters = ("gradients", "staleness_weights")

    def __init__(self, gradients: int, staleness_weights: bool = False) -> None:
        super().__init__(staleness_weights)
        self.gradients = check_at_least("gradients", gradients, 1)

    @property
    def per_update(self) -> int:
        return self.gradients
