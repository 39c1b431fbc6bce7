"""The engine of processes that update their own copies: it hears what they bring, and says whose gradients count."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from queue import Empty
from time import monotonic
from typing import Any

from torch import Tensor

from quorate.engines.base import Engine, Job, Outcome
from quorate.engines.collective.control.hub import Inbox
from quorate.engines.collective.control.wire import Message
from quorate.engines.collective.tickets import Book
from quorate.errors import BadInput, ProcessLost
from quorate.events import Event, Rebound, Ticket, Timer, WorkerJoined, WorkerLost
from quorate.policies import Policy
from quorate.stopping import Stop

#: Policies whose versions every process can make at once, of gradients of one version.
COLLECTIVE_POLICIES = frozenset({"full-sync", "backup", "deadline", "delayed", "adaptive"})
ALL_HAVE_FINISHED = "all workers have finished"

#: Kinds that say what became of a gradient, or follow on it; they are taken in the order in which a process said them.
_IN_ORDER = ("arrived", "refused", "abandoned", "began", "finished")
#: When no further version can be made: how long to wait for the others to finish, too.
_GRACE_S = 1.0


def check_collective(policy: Policy) -> None:
    """Refuse a policy that processes with their own copies cannot follow, and say which engine can."""
    if policy.name not in COLLECTIVE_POLICIES:
        can = ", ".join(sorted(COLLECTIVE_POLICIES))
        raise BadInput(
            f"the collective engine cannot run policy {policy.name!r}: all processes make an update together, of "
            f"gradients of one version; use the local, ray or simulated engine, or one of: {can}"
        )


class Ending(Stop):
    """The end of a run, once somebody has said why."""

    at_once = True
    why: str | None = None

    @property
    def reason(self) -> str | None:
        return self.why


class Judged(Engine):
    """Worker 0's view of all processes, for the coordinator that runs in one of its threads.

    inbox: what processes say, and what this process says of itself (`version_made`, `end`).
    broadcast: tells every process something.
    decides: whether the processes wait for the policy's decision; otherwise it is only written down.
    first_version: what the processes call version 0 of this run, where they go on from a checkpoint.
    on_record: called with (time, version, measures) when a process has measured something.
    """

    name = "collective"
    policies = COLLECTIVE_POLICIES

    def __init__(
        self,
        workers: int,
        inbox: Inbox,
        broadcast: Callable[[Message], None],
        *,
        decides: bool,
        first_version: int = 0,
        parameter_bytes: int = 0,
        describe: dict[str, Any] | None = None,
        on_record: Callable[[float, int, dict[str, float]], None] | None = None,
    ) -> None:
        self.workers = workers
        self.decides, self.first_version = decides, first_version
        self.ending = Ending()
        self.reason = ""  # of the decision that is carried out next
        self._inbox, self._broadcast = inbox, broadcast
        self._parameter_bytes, self._describe, self._on_record = parameter_bytes, describe or {}, on_record
        self._unread: deque[tuple[float, int, Message]] = deque()  # came while a version was made
        self._events: deque[Event] = deque()
        self._timers: list[tuple[float, int]] = []
        self._made: dict[int, float] = {}  # version -> seconds it took
        self._hyper: dict[int, tuple[int, Any]] = {}  # by worker: steps it has made, and hyperparameters it brought
        self._version = 0
        self._newest_time = 0.0  # that is in the trace
        self._times_to_keep = 0  # how often the coordinator will ask for one that it writes down
        self._stuck_at: float | None = None  # since when no further version can be made
        self._somebody_waits = False  # for a batch

    def check(self, policy: Policy) -> None:
        check_collective(policy)
        policy.check(self.workers)

    # ------------------------------------------------------------ open and close

    def open(self, job: Job) -> None:
        self.check(job.policy)
        self._began = monotonic()
        self._ledger: Any = job.ledger
        self._history = job.policy.history
        self._needs = job.policy.begin(self.workers)
        self._book = Book(self.workers, job.ledger, in_order=not self.decides)
        self._live = dict.fromkeys(range(self.workers))
        self._events.extend(WorkerJoined(0.0, worker) for worker in self._live)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "latency": None, "arithmetic": None, **self._describe}

    def close(self) -> None:
        pass  # what it hears and speaks through is others'

    # ------------------------------------------------------------ from other threads of this process

    def version_made(self, version: int, seconds: float) -> None:
        """The data plane has made this version here."""
        self._inbox.put((monotonic(), 0, {"kind": "made", "version": version, "seconds": seconds}))

    def end(self, why: str) -> None:
        """End the run, without telling the processes, as soon as what was decided so far is done."""
        self._inbox.put((monotonic(), 0, {"kind": "end", "why": why}))

    # ------------------------------------------------------------ tickets

    def start(self, ticket: Ticket) -> None:
        self._book.start(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._book.cancel(ticket, self._clock())

    def drop(self, ticket: Ticket) -> None:
        self._book.end(ticket)

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        """Let the processes make the next version.

        The next tickets begin when it is made, so that is waited for. Not with a delay: that a version is made while
        workers compute is the point of it.
        """
        version = self._version + 1
        if self.decides:
            self._broadcast(self._go(version, [ticket.worker for ticket in tickets]))
        if not self._history:
            self._wait_for(version)
        self._version = self._book.version = version
        self._times_to_keep = 2  # of the update, and of what follows on it
        refused = tuple(ticket for ticket in tickets if self._book.end(ticket))
        return Outcome(None, None, refused, self._made.pop(version, None))

    def _go(self, version: int, members: list[int]) -> Message:
        """What all are told; with the hyperparameters of the member that has made the most steps."""
        go = {"kind": "go", "version": version + self.first_version, "members": members, "reason": self.reason}
        known = [self._hyper[worker] for worker in members if worker in self._hyper]
        return {**go, "hyper": max(known, key=itemgetter(0))[1]} if known else go

    def _wait_for(self, version: int) -> None:
        while version not in self._made:
            said = self._counted_here(self._inbox.get())
            message = said[2]
            if message["kind"] == "made":
                self._made[message["version"]] = message["seconds"]
                continue
            if message["kind"] == "lost":
                raise ProcessLost(message["why"])
            if message["kind"] == "end":
                raise ProcessLost(f"the run ended while version {version} was made: {message['why']}")
            self._unread.append(said)
            if not self.decides and (
                message["kind"] == "finished" or (message["kind"] == "arrived" and message["version"] >= version)
            ):
                return  # somebody has it

    # ------------------------------------------------------------ time

    def _clock(self) -> float:
        return monotonic() - self._began

    def now(self, time: float) -> float:
        now = max(self._newest_time, self._clock())
        if self._times_to_keep:  # what follows on an update carries this time; otherwise it is only looked at
            self._times_to_keep -= 1
            self._newest_time = now
        return now

    def set_timer(self, at: float, key: int) -> None:
        heapq.heappush(self._timers, (at, key))

    # ------------------------------------------------------------ events

    def next_event(self, until: float | None) -> Event | None:
        while not self._events:
            self._events.extend(self._book.ready_events(self._clock()))
            over = not self._events and self._is_over()
            if over or self._events:  # that somebody has left, too, may be found there
                break
            said = self._next_said(0.0)
            if said is None:  # before timers: what came in time counts
                now = self._clock()
                if self._timers and self._timers[0][0] <= now:
                    self._events.append(Timer(now, heapq.heappop(self._timers)[1]))
                    break
                if until is not None and now >= until:
                    return None
                # Looked up from now and then, as long as somebody has finished.
                heads = (until, self._timers and self._timers[0][0], self._book.finished and now + _GRACE_S / 4)
                wake = [time for time in heads if time]
                said = self._next_said(min(wake) - now if wake else None)
            if said is not None:
                self._take_in(*said)
        return self._hand_out(self._events.popleft()) if self._events else None

    def _hand_out(self, event: Event) -> Event:
        if isinstance(event, Rebound) and event.ticket.version < self._version:
            event = self._book.late(event)
        if isinstance(event, WorkerLost):
            self._live.pop(event.worker, None)
            left = getattr(self._ledger, "left", None)
            if left is not None:
                left(event.worker)
        # What came while a version was made has an earlier time; in the trace, time does not go back.
        self._newest_time = max(self._newest_time, event.time)
        return event._replace(time=self._newest_time)

    def _next_said(self, timeout_s: float | None) -> tuple[float, int, Message] | None:
        if self._unread:
            return self._unread.popleft()
        try:
            said = self._inbox.get(timeout_s != 0, None if timeout_s is None else max(0.0, timeout_s))
            return self._counted_here(said)
        except Empty:
            return None

    def _counted_here(self, said: tuple[float, int, Message]) -> tuple[float, int, Message]:
        """With versions as this run counts them."""
        received, worker, message = said
        if not self.first_version or "version" not in message:
            return said
        return received, worker, {**message, "version": message["version"] - self.first_version}

    def _take_in(self, received: float, worker: int, message: Message) -> None:
        kind, time = message["kind"], max(0.0, received - self._began)
        if kind in _IN_ORDER:
            if "hyper" in message:
                self._hyper[worker] = message.get("steps", 0), message["hyper"]
            self._events.extend(self._book.said(time, worker, message))
            if kind == "arrived":  # so the run goes on without those that have finished
                self._events.extend(self._book.leave(time, message["version"]))
        elif kind == "made":
            self._made[message["version"]] = message["seconds"]
            self._made.pop(message["version"] - 64, None)  # nobody will ask for it
        elif kind == "want":
            self._somebody_waits = True
            self._events.extend(self._book.leave(time))
            self._ledger.wanted(worker, **{key: value for key, value in message.items() if key != "kind"})
        elif kind == "record":
            if self._on_record is not None:
                self._on_record(self._newest_time, message["version"], message["measures"])
        elif kind == "lost":
            raise ProcessLost(message["why"])
        elif kind == "end":
            self.ending.why = message["why"]
        else:
            raise AssertionError(f"worker {worker} sent a {kind} message, which nobody knows")

    # ------------------------------------------------------------ the end

    def _is_over(self) -> bool:
        """Whether there is no further version: too few workers have something to bring."""
        if self.ending.why is not None:
            return True
        if not self._book.finished and len(self._live) == self.workers:
            return False  # which is nearly always so
        now, needed = self._clock(), self._needs.needed
        if len(self._book.finished) == len(self._live):
            self._tell_over(ALL_HAVE_FINISHED)
        elif self._can_go_on(needed):
            self._stuck_at = None
            finished_at = min(self._book.finished.values(), default=now)
            if now >= finished_at + _GRACE_S:
                self._events.extend(self._book.leave(now))
        elif self._stuck_at is None:
            self._stuck_at, self._somebody_waits = now, False
        if self._stuck_at is not None and (
            self._somebody_waits or self._book.waiting_among(self._live) or now >= self._stuck_at + _GRACE_S
        ):
            left = len(self._live) - len(self._book.finished)
            self._tell_over(
                f"{self.workers - left} of {self.workers} workers have finished, and {self._needs.name} needs {needed}"
            )
        return self.ending.why is not None

    def _can_go_on(self, needed: int) -> bool:
        enough = len(self._live) >= needed or len(self._live) + self._book.waiting_besides(self._live) >= needed
        return enough and (not self._book.finished or self._book.somebody_computes)

    def _tell_over(self, why: str) -> None:
        self._broadcast({"kind": "over", "reason": why})
        self.ending.why = why

    # ------------------------------------------------------------ the model is with the processes

    def evaluate(self) -> dict[str, float]:
        return {}

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        return None

    def parameter_bytes(self) -> int:
        return self._parameter_bytes
