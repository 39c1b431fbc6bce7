"""Synchronous SGD with backup workers (Chen et al., 2016)."""

from __future__ import annotations

from quorate.errors import BadInput, check_at_least
from quorate.policies.base import check_quorum
from quorate.policies.rounds import RoundPolicy


class BackupSync(RoundPolicy):
    """Quorum + backups workers compute; the first `quorum` gradients of a version make the update."""

    name = "backup"
    colour = "#D55E00"

    def __init__(self, quorum: int, backups: int = 0, late: str = "cancel") -> None:
        super().__init__(late)
        self.quorum = check_at_least("quorum", quorum, 1)
        self.backups = check_at_least("backups", backups, 0)

    def check(self, workers: int) -> None:
        super().check(workers)
        check_quorum(self.quorum, workers)
        if self.quorum + self.backups != workers:
            raise BadInput(
                f"quorum {self.quorum} + backups {self.backups} makes {self.quorum + self.backups} workers, "
                f"but the run has {workers}; give the engine (or torchrun) {self.quorum + self.backups} workers"
            )

    @property
    def workers_named(self) -> int:
        return self.quorum + self.backups

    @property
    def per_update(self) -> int:
        return self.quorum
