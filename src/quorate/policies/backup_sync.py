"""Synchronous SGD with backup workers (Chen et al., 2016)."""

from __future__ import annotations

from quorate.errors import BadInput, check_at_least
from quorate.policies._rounds import RoundPolicy


class BackupSync(RoundPolicy):
    """Quorum + backups workers compute; the first `quorum` gradients of a version make the update."""

    name = "backup"
    parameters = ("quorum", "backups", "late")

    def __init__(self, quorum: int, backups: int = 0, late: str = "cancel") -> None:
        super().__init__(late)
        self.quorum = check_at_least("quorum", quorum, 1)
        self.backups = check_at_least("backups", backups, 0)

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.quorum > workers:
            raise BadInput(
                f"quorum is {self.quorum}, but the run has {workers} workers: "
                f"a quorum above the workers is never reached; lower it or add workers"
            )
        if self.quorum + self.backups != workers:
            raise BadInput(
                f"quorum {self.quorum} + backups {self.backups} makes {self.quorum + self.backups} workers, "
                f"but the run has {workers}; give the engine (or torchrun) {self.quorum + self.backups} workers"
            )

    @property
    def per_update(self) -> int:
        return self.quorum
