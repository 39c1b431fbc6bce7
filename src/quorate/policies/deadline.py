"""A timeout instead of backups: a round closes at its quorum or when its time is up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, ClassVar

from quorate.errors import BadInput, check_at_least
from quorate.events import Action, SetTimer, Ticket
from quorate.policies.base import QUORUM_FLAG, Flag, check_quorum
from quorate.policies.rounds import TimedRoundPolicy

WARM_UP_ROUNDS = 5  # rounds that wait for the whole quorum before a learned limit is trusted
WINDOW_ROUNDS = 25  # rounds that a learned limit remembers


class Deadline(TimedRoundPolicy):
    """A round closes at `quorum` arrivals (default: all workers) or after `limit` seconds.

    Without a `limit`, the policy learns it: `slack` times the time in which half of the workers usually arrive. The
    median is used because it stays known although the slowest workers are cut off, and so never timed. If time
    is up before `min_quorum` arrivals (default: half the quorum) are in, the round waits for `min_quorum` arrivals.
    """

    name = "deadline"
    colour = "#7F7F7F"
    flags: ClassVar = {
        "limit": Flag("Seconds a round lasts.", "SECONDS", "learned"),
        "quorum": QUORUM_FLAG,
        "min_quorum": Flag("Fewest gradients of an update when time is up.", default="half the quorum"),
        "slack": Flag("Learned limit as a multiple of the median arrival time.", "X"),
    }
    drawback = "the number of gradients in an update changes from round to round"

    def __init__(
        self,
        limit: float | None = None,
        quorum: int | None = None,
        min_quorum: int | None = None,
        slack: float = 1.5,
        late: str = "cancel",
    ) -> None:
        super().__init__(late)
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise BadInput(f"limit is {limit} s, but a deadline must be more than 0 s; leave it out to learn it")
        if not (slack >= 1 and math.isfinite(slack)):
            raise BadInput(f"slack is {slack}, but the limit is slack times the median arrival: at least 1")
        self.limit = limit
        self.quorum = None if quorum is None else check_at_least("quorum", quorum, 1)
        self.min_quorum = None if min_quorum is None else check_at_least("min_quorum", min_quorum, 1)
        self.slack = slack

    def check(self, workers: int) -> None:
        super().check(workers)
        quorum = workers if self.quorum is None else self.quorum
        check_quorum(quorum, workers)
        if self.min_quorum is not None and self.min_quorum > quorum:
            raise BadInput(f"min_quorum is {self.min_quorum}, but the quorum is {quorum}; lower min_quorum")

    @classmethod
    def from_workers(cls, quorum: int, backups: int) -> dict[str, Any]:
        return {"quorum": quorum} if backups else {}

    @property
    def per_update(self) -> int:
        return self.workers if self.quorum is None else self.quorum

    @property
    def needed(self) -> int:
        return math.ceil(self.per_update / 2) if self.min_quorum is None else self.min_quorum

    def reset(self, workers: int) -> None:
        super().reset(workers)
        self._opened_at = 0.0
        self._half_times: deque[float] = deque(maxlen=WINDOW_ROUNDS)

    def opened(self, time: float) -> list[Action]:
        self._opened_at = time
        self.time_is_up = False
        limit, reason = self._limit_now()
        return [] if limit is None else [SetTimer(time + limit, self.version, reason)]

    def _limit_now(self) -> tuple[float | None, str]:
        if self.limit is not None:
            return self.limit, "fixed limit"
        if len(self._half_times) < WARM_UP_ROUNDS:
            return None, "still learning"
        return self.slack * median(self._half_times), "learned limit"

    def arrived(self, time: float, ticket: Ticket) -> Iterable[Action]:
        if ticket.version == self.version and len(self.arrivals) + 1 == (len(self.live) + 1) // 2:
            self._half_times.append(time - self._opened_at)
        return super().arrived(time, ticket)

    def why(self) -> str:
        if self.time_is_up and self.needed <= len(self.arrivals) < self.per_update:
            return "time is up"
        if self.idle or len(self.arrivals) >= self.per_update:
            return super().why()
        return "all live workers are in"
