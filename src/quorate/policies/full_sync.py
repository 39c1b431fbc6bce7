"""Full synchronous SGD: every worker, every version."""

from __future__ import annotations

from quorate.policies._rounds import RoundPolicy


class FullSync(RoundPolicy):
    """Each update averages one gradient from every worker; the slowest sets the pace."""

    name = "full-sync"

    def __init__(self) -> None:
        super().__init__(late="cancel")  # nobody is late but a worker that joined beyond the run's number

    @property
    def per_update(self) -> int:
        return self._workers
