"""K-batch-sync (Dutta et al., 2018): any `quorum` gradients of a version, also several of one worker."""

from __future__ import annotations

from typing import ClassVar

from quorate.errors import check_at_least
from quorate.events import Action
from quorate.policies.base import QUORUM_FLAG
from quorate.policies.rounds import RoundPolicy


class KBatchSync(RoundPolicy):
    """Like backups, but a worker that has delivered goes on with another batch of the same version."""

    name = "k-batch"
    colour = "#56B4E9"
    flags: ClassVar = {"quorum": QUORUM_FLAG}
    drawback = "quick workers give several gradients of an update, slow ones none, DataParallel cannot run it"
    collective = False  # a worker may be in an update twice

    def __init__(self, quorum: int, late: str = "cancel") -> None:
        super().__init__(late)
        self.quorum = check_at_least("quorum", quorum, 1, 1_000_000)

    @property
    def per_update(self) -> int:
        return self.quorum

    @property
    def needed(self) -> int:
        return 1  # one worker can give all of them

    def delivered(self, worker: int) -> list[Action]:
        return [self.start(worker)]
