"""K-batch-sync (Dutta et al., 2018): any k gradients of a version, whoever computed them."""

from __future__ import annotations

from quorate.errors import check_at_least
from quorate.events import Action
from quorate.policies._rounds import RoundPolicy


class KBatchSync(RoundPolicy):
    """Like backups, but a worker that has delivered goes on with another batch of the same version."""

    name = "k-batch"
    parameters = ("k", "late")

    def __init__(self, k: int, late: str = "cancel") -> None:
        super().__init__(late)
        self.k = check_at_least("k", k, 1)

    @property
    def per_update(self) -> int:
        return self.k

    @property
    def needed(self) -> int:
        return 1  # one worker can give all k

    def _delivered(self, worker: int) -> list[Action]:
        return [self._start(worker)]
