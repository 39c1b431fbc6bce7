"""The synchronous family: a round collects gradients of one version until its quorum is there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from quorate.events import Action, Apply, Cancel, Drop, Start, Ticket
from quorate.policies._base import Policy, check_late, choose, without


class RoundPolicy(Policy):
    """One update, one round: all workers start on the version, the first `quorum` arrivals make the next.

    `late="cancel"` abandons what the others still compute; `late="finish"` lets them finish, and drops what
    they bring (their worker then joins the round that is open by then).
    """

    def __init__(self, late: str = "cancel") -> None:
        self.late = check_late(late)

    @property
    def staleness_bound(self) -> int:
        return 0

    @property
    def needed(self) -> int:
        return self.per_update

    # ------------------------------------------------------------ state

    def _reset(self, workers: int) -> None:
        self._workers = workers
        self._version = 0
        self._live: dict[int, None] = {}  # in the order they joined, which is the order they are started in
        self._busy: dict[int, int] = {}  # worker -> version it computes on
        self._on_version = 0  # how many of those compute on the newest version
        self._idle: dict[int, None] = {}  # live, but the epoch had no batch left for them
        self._arrivals: list[Ticket] = []  # of this round, in order
        self._pinned: dict[int, None] = {}  # workers whose ticket the round must wait for
        self._must: dict[int, None] = {}  # arrived tickets that the round must take

    # ------------------------------------------------------------ events

    def _arrived(self, time: float, ticket: Ticket) -> Iterable[Action]:
        worker = ticket.worker
        del self._busy[worker]
        if ticket.version != self._version:
            # Started before its batch is given back: somebody else gets that one. A worker that is always late would
            # otherwise have the same batch again and again, until the others must wait for it.
            return [self._start(worker), Drop(ticket, "late: its version is over")]
        self._on_version -= 1
        if worker in self._pinned:
            del self._pinned[worker]
            self._must[ticket.id] = None
        self._arrivals.append(ticket)
        return self._close(time) if self._complete() else self._delivered(worker)

    def _delivered(self, worker: int) -> list[Action]:
        """What a worker does whose gradient is in while the round is still open: it waits."""
        return []

    def _refused(self, time: float, ticket: Ticket) -> list[Action]:
        worker = ticket.worker
        self._stop(worker)
        return [self._start(worker)]

    def _joined(self, time: float, worker: int) -> list[Action]:
        opening = [] if self._live else self._opened(time)
        self._live[worker] = None
        if any(ticket.worker == worker for ticket in self._arrivals):  # it had delivered before it was lost
            return [*opening, *self._delivered(worker)]
        return [*opening, self._start(worker)]

    def _lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> Iterable[Action]:
        self._live.pop(worker, None)
        self._idle.pop(worker, None)
        if worker in self._busy:
            self._stop(worker)
        self._arrivals = without(self._arrivals, tickets)
        if self._idle and tickets:  # its batches are back: as many of those without work can have them
            return [self._start(other) for other in list(self._idle)[: len(tickets)]]
        return self._close(time) if self._complete() else []

    def _exhausted(self, time: float, worker: int) -> Iterable[Action]:
        self._stop(worker)
        self._idle[worker] = None
        if not self._busy and not self._arrivals:  # every batch of this round was given up: try the next epoch
            return [self._start(other) for other in list(self._idle)]
        return self._close(time) if self._complete() else []

    def _pinned_started(self, ticket: Ticket) -> list[Action]:
        self._pinned[ticket.worker] = None
        return []

    # ------------------------------------------------------------ the round

    def _complete(self) -> bool:
        """The quorum is in, or all that is left of the epoch; and so is every pinned batch."""
        if self._pinned:
            return False
        have = len(self._arrivals)
        return have >= self.per_update or (have > 0 and self._on_version == 0 and bool(self._idle))

    def _why(self) -> str:
        if len(self._arrivals) >= self.per_update:
            return "quorum reached"
        return "all that was left of the epoch"

    def _close(self, time: float) -> Iterable[Action]:
        reason = self._why()
        chosen, surplus = choose(self._arrivals, self.per_update, self._must)
        actions: list[Action] = [Apply(tuple(chosen), None, reason), *surplus]
        if self.late == "cancel":
            actions += [Cancel(worker, "late: its version is over") for worker in self._busy]
            self._busy.clear()
        version = self._version = self._version + 1
        self._arrivals = []
        self._must.clear()
        self._idle.clear()
        actions += self._opened(time)
        busy = self._busy
        free = [worker for worker in self._live if worker not in busy] if busy else list(self._live)
        for worker in free:
            busy[worker] = version
        self._on_version = len(free)
        # Made one by one as they are carried out: ten thousand at once would push everything else out of the caches.
        return chain(actions, (Start(worker, version, version) for worker in free))

    def _opened(self, time: float) -> list[Action]:
        """What to do when a round opens, before anyone is started."""
        return []

    def _start(self, worker: int) -> Action:
        self._idle.pop(worker, None)
        self._busy[worker] = self._version
        self._on_version += 1
        return Start(worker, self._version, self._version)

    def _stop(self, worker: int) -> None:
        """A ticket in flight ended without arriving."""
        self._pinned.pop(worker, None)
        if self._busy.pop(worker) == self._version:
            self._on_version -= 1
