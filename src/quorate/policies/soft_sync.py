"""Softsync (Zhang et al., 2016): an update whenever enough gradients have arrived, of any staleness."""

from __future__ import annotations

from typing import ClassVar

from quorate.errors import check_at_least
from quorate.policies.arrival_groups import ArrivalPolicy
from quorate.policies.base import QUORUM_FLAG


class SoftSync(ArrivalPolicy):
    """Apply the mean of every `quorum` arrivals; no worker waits, and no gradient is dropped."""

    name = "softsync"
    colour = "#CC79A7"
    flags: ClassVar = {"quorum": QUORUM_FLAG}

    def __init__(self, quorum: int, staleness_weights: bool = False) -> None:
        super().__init__(staleness_weights)
        self.quorum = check_at_least("quorum", quorum, 1, 1_000_000)

    @property
    def per_update(self) -> int:
        return self.quorum
