"""The collective engine: processes update their own copies of the model; it decides whose gradients count."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from queue import Empty
from time import monotonic
from typing import Any

from torch import Tensor

from quorate.coordinator import ALL_HAVE_FINISHED
from quorate.data_parallel.batches import LendingLedger
from quorate.data_parallel.control.hub import Inbox
from quorate.data_parallel.control.wire import Message
from quorate.data_parallel.ticket_matching import TicketMatching
from quorate.engines.base import Engine, Job, Outcome
from quorate.errors import BadInput, ProcessLost, QuorateError
from quorate.events import Event, Rebound, Ticket, Timer, Withdrawn, WorkerJoined, WorkerLost
from quorate.machine import core_wait_s, machine
from quorate.policies import POLICIES, Policy
from quorate.stopping import Stop
from quorate.trace_replay import RECORDED

#: Message kinds about a gradient or the step after it; they are handled in the order in which a process sent them.
_IN_ORDER = ("arrived", "refused", "abandoned", "began", "finished")
#: When no further version can be made: time for the remaining processes to finish, too.
_GRACE_S = 1.0


def check_collective(policy: Policy) -> None:
    """Refuse a policy that processes with their own copies cannot follow; the error names an engine that can."""
    if not policy.collective:
        can = ", ".join(sorted(name for name, kind in POLICIES.items() if kind.collective))
        own = "" if policy.name in POLICIES else ", or set collective = True in the class if it keeps that rule"
        raise BadInput(
            f"the collective engine cannot run policy {policy.name!r}: all processes make an update together, of "
            f"gradients of one version; use the local, ray or simulated engine, or one of: {can}{own}"
        )


class Ending(Stop):
    """Ends the run as soon as its reason is set."""

    at_once = True
    reason: str | None = None


class CollectiveEngine(Engine):
    """Worker 0's view of all processes, for the coordinator that runs in one of its threads.

    inbox: messages of the processes, and of this process's other threads (`version_made`, `end`).
    broadcast: sends a message to every process.
    decides: whether the processes wait for the policy's decision; otherwise the decision is only recorded.
    first_version: the processes' number for version 0 of this run; above 0 after a resume from a checkpoint.
    on_record: called with (time, version, measures) when a process reports measurements.
    """

    name = "collective"

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
        self._inbox, self._broadcast = inbox, broadcast
        self._parameter_bytes, self._describe, self._on_record = parameter_bytes, describe or {}, on_record
        self._unread: deque[tuple[float, int, Message]] = deque()  # received while a version was made
        self._events: deque[Event] = deque()
        self._timers: list[tuple[float, int]] = []
        self._made: dict[int, float] = {}  # version -> seconds that the update took
        self._hyper: dict[int, tuple[int, Any]] = {}  # by worker: its step count and its hyperparameters
        self._version = 0
        self._newest_time = 0.0  # in the trace
        self._times_to_keep = 0  # number of next `now` calls whose time the coordinator records
        self._stuck_at: float | None = None  # since when no further version can be made
        self._wants_batch = False  # a process waits for a batch
        self._meeting: dict[int, bool] = {}  # workers in `meet` -> whether an open round may lack them

    def check(self, policy: Policy) -> None:
        check_collective(policy)
        policy.check(self.workers)

    def open(self, job: Job) -> None:
        self.check(job.policy)
        self._began = monotonic()
        self._lending = job.ledger if isinstance(job.ledger, LendingLedger) else None
        self._history = job.policy.history
        self._needs = job.policy.begin(self.workers)
        self._tickets = TicketMatching(self.workers, self._lending, in_order=not self.decides)
        self._live = dict.fromkeys(range(self.workers))
        self._events.extend(WorkerJoined(0.0, worker) for worker in self._live)

    def core_waits(self) -> dict[int, float]:
        """Estimated from this process, as if all workers waited as long."""
        wait_s = core_wait_s()
        return {} if wait_s is None else {os.getpid(): wait_s * self.workers}

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "latency": None, "arithmetic": None, **self._describe}

    def header(self) -> dict[str, Any]:
        return {
            "machine": machine(int(os.environ.get("LOCAL_WORLD_SIZE", self.workers))),
            "batches": RECORDED,  # each process took a batch when it needed one
            "first_version": self.first_version,
        }

    def close(self) -> None:
        pass  # The inbox and the broadcast belong to the hub.

    # ------------------------------------------------------------ from other threads of this process

    def version_made(self, version: int, seconds: float) -> None:
        """The data plane of this process has made this version."""
        self._inbox.put((monotonic(), 0, {"kind": "made", "version": version, "seconds": seconds}))

    def end(self, why: str) -> None:
        """End the run when all decisions so far are carried out, without telling the processes."""
        self._inbox.put((monotonic(), 0, {"kind": "end", "why": why}))

    def hear_last_measures(self) -> None:
        """When the run is over: take in the measures that processes still send, until all have finished.

        A script may evaluate after its last step, while the run is over because others have finished.
        """
        left = self._live.keys() - self._tickets.finished.keys()
        while left:
            received = self._next_message(None)
            assert received is not None
            _, worker, message = received
            if message["kind"] in ("end", "lost"):
                return
            if message["kind"] == "record":
                self._handle(*received)
            elif message["kind"] == "finished":
                left.discard(worker)

    # ------------------------------------------------------------ tickets

    def start(self, ticket: Ticket) -> None:
        self._tickets.start(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self._tickets.cancel(ticket, self._clock())

    def drop(self, ticket: Ticket) -> None:
        self._tickets.end(ticket)

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None, reason: str) -> Outcome:
        """Let the processes make the next version.

        The next tickets start when the version is made, so this method waits for it. It does not wait under a policy
        with a delay, which makes versions while workers compute.
        """
        version = self._version + 1
        workers = {ticket.worker for ticket in tickets if ticket.version == self._version}
        if self.decides and (len(workers) < len(tickets) or weights is not None):
            raise BadInput(
                f"policy {self._needs.name!r} broke the collective engine's rule at version {self._version}: an update "
                f"is the plain mean of gradients of the newest version, at most one of each worker"
            )
        if self.decides:
            self._broadcast(self._go(version, [ticket.worker for ticket in tickets], reason))
        if not self._history:
            self._wait_for(version)
        self._version = self._tickets.version = version
        self._times_to_keep = 2  # the time of the update, and of the decision after it
        refused = tuple(ticket for ticket in tickets if self._tickets.end(ticket))
        return Outcome(None, None, refused, self._made.pop(version, None))

    def _go(self, version: int, members: list[int], reason: str) -> Message:
        """The decision for all processes, with the hyperparameters of the member that has made the most steps."""
        go = {"kind": "go", "version": version + self.first_version, "members": members, "reason": reason}
        known = [self._hyper[worker] for worker in members if worker in self._hyper]
        return {**go, "hyper": max(known, key=itemgetter(0))[1]} if known else go

    def _wait_for(self, version: int) -> None:
        while version not in self._made:
            received = self._receive(None)
            assert received is not None
            message = received[2]
            if message["kind"] == "made":
                self._made[message["version"]] = message["seconds"]
                continue
            if message["kind"] == "lost":
                raise ProcessLost(message["why"])
            if message["kind"] == "end":
                raise ProcessLost(f"the run ended while version {version} was made: {message['why']}")
            self._unread.append(received)
            if not self.decides and (
                message["kind"] == "finished" or (message["kind"] == "arrived" and message["version"] >= version)
            ):
                return  # another process has it

    def _clock(self) -> float:
        return monotonic() - self._began

    def now(self, time: float) -> float:
        now = max(self._newest_time, self._clock())
        if self._times_to_keep:  # the coordinator records the time of this call
            self._times_to_keep -= 1
            self._newest_time = now
        return now

    def set_timer(self, at: float, key: int) -> None:
        heapq.heappush(self._timers, (at, key))

    # ------------------------------------------------------------ events

    def next_event(self, until: float | None) -> Event | None:
        while not self._events:
            self._events.extend(self._tickets.ready_events(self._clock()))
            if self._meeting and not self._events:
                self._look_at_meeting()
            over = not self._events and self._is_over()
            if over or self._events:  # `_is_over` may also add the loss of a finished worker
                break
            received = self._next_message(0.0)
            if received is None:  # messages come before timers: a message that came in time counts
                now = self._clock()
                if self._timers and self._timers[0][0] <= now:
                    self._events.append(Timer(now, heapq.heappop(self._timers)[1]))
                    break
                if until is not None and now >= until:
                    return None
                # Once a worker has finished, `_is_over` must be called regularly.
                times = (until, self._timers and self._timers[0][0], self._tickets.finished and now + _GRACE_S / 4)
                wake_at = [time for time in times if time]
                received = self._next_message(min(wake_at) - now if wake_at else None)
            if received is not None:
                try:
                    self._handle(*received)
                except QuorateError:
                    raise
                except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
                    what = f"worker {received[1]} sent a {received[2]['kind']} message that is not understood"
                    raise QuorateError(f"{what} ({type(error).__name__}: {error})") from error
        return self._hand_out(self._events.popleft()) if self._events else None

    def _hand_out(self, event: Event) -> Event:
        if isinstance(event, Rebound) and event.ticket.version < self._version:
            event = self._tickets.late(event)
        if isinstance(event, WorkerLost):
            self._live.pop(event.worker, None)
            if self._lending is not None:
                self._lending.left(event.worker)
        if isinstance(event, Withdrawn) and self._tickets.is_waiting(event.ticket):
            self._broadcast({"kind": "vain", "to": event.ticket.worker})
        # A message that came while a version was made has an earlier time; in the trace, time never goes back.
        self._newest_time = max(self._newest_time, event.time)
        return event._replace(time=self._newest_time)

    def _next_message(self, timeout_s: float | None) -> tuple[float, int, Message] | None:
        return self._unread.popleft() if self._unread else self._receive(timeout_s)

    def _receive(self, timeout_s: float | None) -> tuple[float, int, Message] | None:
        """The inbox's next message, with versions as this run counts them; None after the timeout."""
        try:
            received = self._inbox.get(timeout_s != 0, None if timeout_s is None else max(0.0, timeout_s))
        except Empty:
            return None
        time, worker, message = received
        if not self.first_version or "version" not in message:
            return received
        return time, worker, {**message, "version": message["version"] - self.first_version}

    def _handle(self, received: float, worker: int, message: Message) -> None:
        kind, time = message["kind"], max(0.0, received - self._began)
        if kind in _IN_ORDER:
            if "hyper" in message:
                self._hyper[worker] = message.get("steps", 0), message["hyper"]
            self._events.extend(self._tickets.said(time, worker, message))
            if kind == "arrived":  # the run goes on without the workers that have finished
                self._events.extend(self._tickets.leave(time, message["version"]))
        elif kind == "made":
            self._made[message["version"]] = message["seconds"]
            self._made.pop(message["version"] - 64, None)  # too old to be asked for
        elif kind == "want":
            self._wants_batch = True
            self._events.extend(self._tickets.leave(time))
            assert self._lending is not None
            self._lending.wanted(worker, **{key: value for key, value in message.items() if key != "kind"})
        elif kind == "meet":
            self._meeting[worker] = message["lacking"]
        elif kind == "record":
            if self._on_record is not None:
                self._on_record(self._newest_time, message["version"], message["measures"])
        elif kind == "lost":
            raise ProcessLost(message["why"])
        elif kind == "end":
            self.ending.reason = message["why"]
        else:
            raise AssertionError(f"worker {worker} sent a message of the unknown kind {kind}")

    def _look_at_meeting(self) -> None:
        """End the meeting once all workers are in it; withdraw arrivals that wait for a quorum which cannot form."""
        outside = self._live.keys() - self._meeting.keys() - self._tickets.finished.keys()
        if not outside:
            self._meeting.clear()
            epoch = 0 if self._lending is None else self._lending.newest_epoch
            self._broadcast({"kind": "met", "version": self._version + self.first_version, "epoch": epoch})
        elif any(self._meeting.values()) and not any(key == self._version for _, key in self._timers):
            self._events.extend(self._tickets.withdraw(sorted(outside), self._clock()))

    def _is_over(self) -> bool:
        """Whether no further version can be made: too few workers can still bring a gradient."""
        if self.ending.reason is not None:
            return True
        if not self._tickets.finished and len(self._live) == self.workers:
            return False  # the usual case, without reading the clock
        now, needed, waiting = self._clock(), self._needs.needed, self._tickets.waiting_workers()
        if len(self._tickets.finished) == len(self._live):
            self._tell_over(ALL_HAVE_FINISHED)
        elif len(self._live.keys() | waiting) >= needed and (not self._tickets.finished or self._tickets.any_in_flight):
            self._stuck_at = None
            finished_at = min(self._tickets.finished.values(), default=now)
            if now >= finished_at + _GRACE_S:
                self._events.extend(self._tickets.leave(now))
        elif self._stuck_at is None:
            self._stuck_at, self._wants_batch = now, False
        if self._stuck_at is not None and (
            self._wants_batch or waiting & self._live.keys() or now >= self._stuck_at + _GRACE_S
        ):
            left = len(self._live) - len(self._tickets.finished)
            self._tell_over(
                f"{self.workers - left} of {self.workers} workers have finished, and {self._needs.name} needs {needed}"
            )
        return self.ending.reason is not None

    def _tell_over(self, why: str) -> None:
        self._broadcast({"kind": "over", "reason": why})
        self.ending.reason = why

    # ------------------------------------------------------------ empty: the model is in the processes

    def evaluate(self) -> dict[str, float]:
        return {}

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        return None

    def parameter_bytes(self) -> int:
        return self._parameter_bytes
