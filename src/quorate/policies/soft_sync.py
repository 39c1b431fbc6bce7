"""Softsync (Zhang et al., 2016): an update whenever enough gradients have arrived, of any staleness."""

from __future__ import annotations

from typing import Any

from quorate.errors import check_at_least
from quorate.policies.arrival_groups import ArrivalPolicy


class SoftSync(ArrivalPolicy):
    """Apply the mean of every `gradients` arrivals; no worker waits, and no gradient is dropped."""

    name = "softsync"

    def __init__(self, gradients: int, staleness_weights: bool = False) -> None:
        super().__init__(staleness_weights)
        self.gradients = check_at_least("gradients", gradients, 1, 1_000_000)

    @classmethod
    def from_workers(cls, quorum: int, backups: int) -> dict[str, Any]:
        return {"gradients": quorum}

    @property
    def per_update(self) -> int:
        return self.gradients
