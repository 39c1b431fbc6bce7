"""K-batch-sync (Dutta et al., 2018): any k gradients of a version, also several of one worker."""

from __future__ import annotations

from typing import Any

from quorate.errors import check_at_least
from quorate.events import Action
from quorate.policies.rounds import RoundPolicy


class KBatchSync(RoundPolicy):
    """Like backups, but a worker that has delivered goes on with another batch of the same version."""

    name = "k-batch"
    collective = False  # a worker may be in an update twice

    def __init__(self, k: int, late: str = "cancel") -> None:
        super().__init__(late)
        self.k = check_at_least("k", k, 1, 1_000_000)

    @classmethod
    def from_workers(cls, quorum: int, backups: int) -> dict[str, Any]:
        return {"k": quorum}

    @property
    def per_update(self) -> int:
        return self.k

    @property
    def needed(self) -> int:
        return 1  # one worker can give all k

    def delivered(self, worker: int) -> list[Action]:
        return [self.start(worker)]
