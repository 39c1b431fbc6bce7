"""Base classes of synchronous policies: a round collects gradients of one version until its quorum has arrived."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import ClassVar

from quorate.events import Action, Apply, Cancel, Drop, Start, Ticket
from quorate.policies.base import LATE_FLAG, Policy, check_late, choose, without


class RoundPolicy(Policy):
    """One update, one round: all workers start on the version, the first `quorum` arrivals make the next.

    `late="cancel"` cancels the tickets that are still computed. `late="finish"` lets them finish, and drops their
    gradients; their workers then join the round that is open by then.
    """

    has_rounds = steady = collective = True
    flags: ClassVar = {"late": LATE_FLAG}

    def __init__(self, late: str = "cancel") -> None:
        self.late = check_late(late)

    @property
    def staleness_bound(self) -> int:
        return 0

    @property
    def needed(self) -> int:
        return self.per_update

    # ------------------------------------------------------------ state

    def reset(self, workers: int) -> None:
        self.workers = workers
        self.version = 0
        self.live: dict[int, None] = {}  # in the order they joined, which is the order they are started in
        self.busy: dict[int, int] = {}  # worker -> version it computes on
        self._on_version = 0  # number of busy workers that compute on the newest version
        self.idle: dict[int, None] = {}  # live, but the epoch had no batch left for them
        self.arrivals: list[Ticket] = []  # of this round, in order
        self._pinned: dict[int, None] = {}  # workers whose ticket the round must wait for
        self._must: dict[int, None] = {}  # arrived tickets that the round must take

    # ------------------------------------------------------------ events

    def arrived(self, time: float, ticket: Ticket) -> Iterable[Action]:
        worker = ticket.worker
        del self.busy[worker]
        if ticket.version != self.version:
            # The worker starts before its late batch is given back, so that another worker gets that batch. Otherwise
            # a worker that is always late would have the same batch until it is pinned and the round waits for it.
            return [self.start(worker), Drop(ticket, "late: its version is over")]
        self._on_version -= 1
        if worker in self._pinned:
            del self._pinned[worker]
            self._must[ticket.id] = None
        self.arrivals.append(ticket)
        return self.close(time) if self.complete() else self.delivered(worker)

    def delivered(self, worker: int) -> list[Action]:
        """The actions for a worker whose gradient is in while the round is still open: none, it waits."""
        return []

    def refused(self, time: float, ticket: Ticket) -> list[Action]:
        worker = ticket.worker
        self.stop(worker)
        return [self.start(worker)]

    def withdrawn(self, time: float, ticket: Ticket) -> list[Action]:
        self.arrivals = without(self.arrivals, (ticket.id,))
        self._must.pop(ticket.id, None)
        return [self.start(ticket.worker)]

    def joined(self, time: float, worker: int) -> list[Action]:
        opening = [] if self.live else self.opened(time)
        self.live[worker] = None
        if any(ticket.worker == worker for ticket in self.arrivals):  # it had delivered before it was lost
            return [*opening, *self.delivered(worker)]
        return [*opening, self.start(worker)]

    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> Iterable[Action]:
        self.live.pop(worker, None)
        self.idle.pop(worker, None)
        if worker in self.busy:
            self.stop(worker)
        self.arrivals = without(self.arrivals, tickets)
        if self.idle and tickets:  # the lost batches are back in the ledger, so as many idle workers can start
            return [self.start(other) for other in list(self.idle)[: len(tickets)]]
        return self.close(time) if self.complete() else []

    def exhausted(self, time: float, worker: int) -> Iterable[Action]:
        self.stop(worker)
        self.idle[worker] = None
        if not self.busy and not self.arrivals:  # every batch of this round was given up: try the next epoch
            return [self.start(other) for other in list(self.idle)]
        return self.close(time) if self.complete() else []

    def pinned(self, ticket: Ticket) -> list[Action]:
        self._pinned[ticket.worker] = None
        return []

    # ------------------------------------------------------------ the round

    def complete(self) -> bool:
        """Whether the quorum is in, or all that is left of the epoch; and every pinned batch."""
        if self._pinned:
            return False
        have = len(self.arrivals)
        return have >= self.per_update or (have > 0 and self._on_version == 0 and bool(self.idle))

    def why(self) -> str:
        if len(self.arrivals) >= self.per_update:
            return "quorum reached"
        return "all that was left of the epoch"

    def close(self, time: float) -> Iterable[Action]:
        reason = self.why()
        chosen, surplus = choose(self.arrivals, self.per_update, self._must)
        actions: list[Action] = [Apply(tuple(chosen), None, reason), *surplus]
        if self.late == "cancel":
            actions += [Cancel(worker, "late: its version is over") for worker in self.busy]
            self.busy.clear()
        version = self.version = self.version + 1
        self.arrivals = []
        self._must.clear()
        self.idle.clear()
        actions += self.opened(time)
        busy = self.busy
        free = [worker for worker in self.live if worker not in busy] if busy else list(self.live)
        for worker in free:
            busy[worker] = version
        self._on_version = len(free)
        # A generator makes each Start when it is carried out: ten thousand at once would flush the CPU caches.
        return chain(actions, (Start(worker, version, version) for worker in free))

    def opened(self, time: float) -> list[Action]:
        """Hook for actions when a round opens, before a worker is started."""
        return []

    def start(self, worker: int) -> Action:
        self.idle.pop(worker, None)
        self.busy[worker] = self.version
        self._on_version += 1
        return Start(worker, self.version, self.version)

    def stop(self, worker: int) -> None:
        """A ticket in flight ended without arriving."""
        self._pinned.pop(worker, None)
        if self.busy.pop(worker) == self.version:
            self._on_version -= 1


class TimedRoundPolicy(RoundPolicy):
    """A round closes at its quorum, or when its timer fires and at least `needed` arrivals are in.

    Timers have the version as their key. Subclasses set them, and reset `time_is_up` when a round opens.
    """

    steady = False

    def reset(self, workers: int) -> None:
        super().reset(workers)
        self.time_is_up = False

    def timer(self, time: float, key: int) -> Iterable[Action]:
        if key != self.version:
            return []  # that round is over
        self.time_is_up = True
        return self.close(time) if self.complete() else []

    def complete(self) -> bool:
        # If no worker is busy, no gradient can arrive, so the round need not wait for its timer.
        over = (self.time_is_up or not self.busy) and not self._pinned
        return (over and len(self.arrivals) >= self.needed) or super().complete()
