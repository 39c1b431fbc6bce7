"""Full synchronous SGD: every worker, every version."""

from __future__ import annotations

from quorate.policies.rounds import RoundPolicy


class FullSync(RoundPolicy):
    """Each update averages one gradient from every worker; the slowest sets the pace."""

    name = "full-sync"
    colour = "#0072B2"
    takes_everybody = True

    def __init__(self) -> None:
        super().__init__(late="cancel")  # only a worker that joined beyond the run's number can be late

    @property
    def per_update(self) -> int:
        return self.workers
