"""The one loop: next event from the engine → policy → carry out the actions → write the trace.

The coordinator never touches a gradient: tensors stay where the engine has them, and actions name tickets. It keeps
the laws that do not depend on the policy: every ticket ends exactly once, every batch is spent or goes back to the
ledger, arrivals of an older incarnation of a worker are ignored, and a run that cannot go on raises an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quorate.engines.base import Engine
from quorate.errors import Diverged, PolicyFailed, QuorumLost
from quorate.events import (
    Abandoned,
    Action,
    Apply,
    Arrived,
    Cancel,
    Choose,
    Drop,
    Event,
    Exhausted,
    Learned,
    Pinned,
    Rebound,
    Refused,
    SetTimer,
    Start,
    Ticket,
    Timer,
    Withdrawn,
    WorkerJoined,
    WorkerLost,
)
from quorate.ledger import Ledger
from quorate.noise import NoiseScale
from quorate.policies import Policy
from quorate.policies.base import pack, pack_action, unpack, unpack_action
from quorate.stopping import EvaluationCutOff, Stop
from quorate.trace import Recorder, Update

#: Refused gradients in a row, per worker, after which a run counts as diverged.
REFUSALS_PER_WORKER = 10

#: Seconds between checks whether a stop was requested.
_STOP_CHECK_S = 0.2

STANDS_STILL = "stands still: no worker is started, and no update can come"
LIMIT_REACHED, DATA_USED_UP, BROKE_OFF = "limit reached", "data used up", "broke off"
ALL_HAVE_FINISHED = "all workers have finished"  # of a script's processes
#: Cancel reason for rebound tickets; replay matches on it.
REBOUND = "rebound: its worker was on another batch"

#: Called after each version with (version, time, loss); a reason ends the run.
AfterUpdate = Callable[[int, float, float | None], str | None]


class Coordinator:
    """Runs a policy on an engine until a limit, the end of the data or a stop request ends the run."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        ledger: Ledger,
        recorders: Sequence[Recorder],
        *,
        after_update: AfterUpdate,
        patience_s: float,
        at_end: Callable[[float], None] | None = None,
        stop: Stop | None = None,
    ) -> None:
        self._policy = policy.begin(engine.workers)
        self._history = policy.history
        self._engine = engine
        self._ledger = ledger
        self._recorders = tuple(recorders)
        self._after_update = after_update
        self._patience_s = patience_s
        self._at_end = at_end  # called when the run is over, before open tickets are dropped
        self._stop = stop
        self._workers = engine.workers
        self.last_time = 0.0  # of the last event, or of the last action carried out after it
        self.is_waiting = False  # for an event: every decision made so far is carried out
        self._version = 0
        self._next_ticket = 0
        self._incarnations: dict[int, int] = {}
        self._live: dict[int, None] = {}
        self._flying: dict[int, Ticket] = {}  # worker -> the ticket it computes
        self._waiting: dict[int, Ticket] = {}  # ticket number -> arrived, not yet applied or dropped
        self._pending: deque[Event] = deque()  # events caused by actions; handled before the engine's events
        self._refusals_in_a_row = 0
        self._noise = NoiseScale()
        self._give_up_at: float | None = None  # while too few workers are alive: when to stop waiting for more
        self._over: str | None = None  # why the run is over
        self._left_over: list[Action] = []  # decided by the policy, but not carried out when the run was over
        self._at_rest: Callable[[float], None] | None = None
        self._end_at_rest: str | None = None
        self._engine_is_away = False  # while a resumed run handles the loss of all its workers

    @property
    def version(self) -> int:
        """How many updates were made."""
        return self._version

    @property
    def why_over(self) -> str:
        """The reason that ended the run: a limit, a stop request, or the end of the data."""
        return self._over or DATA_USED_UP

    def run(self) -> float:
        """Run until `after_update` gives a reason or the ledger is finished; returns the time of the end."""
        engine, handle, pending, ledger = self._engine, self._policy.handle, self._pending, self._ledger
        flying, waiting, recorders, stop = self._flying, self._waiting, self._recorders, self._stop
        time = self.last_time
        pending_in_a_row = 0
        while not self._over and not (ledger.epochs is not None and ledger.finished):
            if (self._at_rest is not None or self._end_at_rest is not None) and not pending:
                if self._end_at_rest is not None:
                    self._over = self._end_at_rest
                    break
                at_rest, self._at_rest = self._at_rest, None
                assert at_rest is not None
                at_rest(time)
            if pending:
                event = pending.popleft()
                pending_in_a_row += 1
                if pending_in_a_row > 4 * len(self._live) + 100:
                    raise self._wrong(STANDS_STILL)
            elif stop is not None and stop.reason is not None and stop.is_due(engine.now(time), self._give_up_at):
                self._over = stop.reason
                break
            else:
                self.is_waiting = True
                upcoming = engine.next_event(self._give_up_at if stop is None else self._wait_until(time))
                if upcoming is None:
                    if stop is not None and self._may_keep_waiting(time):
                        continue
                    raise self._why_nothing_happens(time)
                self.is_waiting = False
                event = upcoming
                pending_in_a_row = 0
            self.last_time = time = event.time
            if type(event) is Arrived:  # here rather than in `_witness`: it is nearly every event
                _, ticket, parts = event
                if flying.get(ticket.worker) is not ticket:
                    continue  # cancelled, or of an older incarnation: the ticket has ended already
                del flying[ticket.worker]
                waiting[ticket.id] = ticket
                for recorder in recorders:
                    recorder.arrived(time, ticket, parts)
                actions = handle(event)
            else:
                heard = self._witness(event)
                actions = handle(heard) if heard is not None else []
            if actions:
                self.last_time = time = self._carry_out(time, actions)
        if self._at_end is not None and self._can_be_saved():
            self._at_end(time)
        self._end_open_tickets(time)
        engine.settle()
        return time

    # ------------------------------------------------------------ events

    def _wait_until(self, time: float) -> float:
        """When to stop waiting for an event, to check for a stop request."""
        soon = self._engine.now(time) + _STOP_CHECK_S
        return soon if self._give_up_at is None else min(self._give_up_at, soon)

    def _may_keep_waiting(self, time: float) -> bool:
        """Whether a run without a new event may wait on, or has waited too long for workers."""
        asked = self._stop is not None and self._stop.reason is not None
        return asked or self._give_up_at is None or self._engine.now(time) < self._give_up_at

    def _why_nothing_happens(self, now: float) -> Exception:
        if self._give_up_at is None:
            return self._wrong(STANDS_STILL)
        return QuorumLost(
            f"{self._policy.name} needs {self._policy.needed} live workers, but only {len(self._live)} of "
            f"{self._workers} are left at {now:.6g} s (version {self._version}), and none came back within "
            f"{self._patience_s:g} s; lower the quorum, take more backups, or wait longer (patience)"
        )

    def _wrong(self, fault: str) -> PolicyFailed:
        return PolicyFailed(f"{self._policy!r} {fault} (version {self._version}); this is a bug in the policy")

    def _witness(self, event: Event) -> Event | None:
        """Record an event other than an arrival; returns the event that the policy hears, or None."""
        if type(event) is WorkerJoined:
            self._witness_join(event)
        elif type(event) is WorkerLost:
            return self._witness_loss(event)
        elif type(event) is Refused:
            ticket = event.ticket
            if self._flying.get(ticket.worker) is not ticket:
                return None
            del self._flying[ticket.worker]
            self._refuse(event.time, ticket)
        elif type(event) is Timer:
            for recorder in self._recorders:
                recorder.timer(event.time, event.key)
        elif type(event) is Abandoned:
            for recorder in self._recorders:
                recorder.abandoned(event.time, event.ticket, event.cancel_s)
            return None
        elif type(event) is Rebound:
            worker, version = event.ticket.worker, event.ticket.version
            if self._flying.get(worker) is event.ticket:
                assert version == self._version, "a worker cannot start on a version that is over"
                self._cancel(event.time, Cancel(worker, REBOUND))
                self._start(event.time, Start(worker, version, version))
            return None
        elif type(event) is Withdrawn:
            if event.ticket.id not in self._waiting:
                return None
            self._drop(event.time, Drop(event.ticket, event.reason), self._ledger.lose)
        return event

    def _witness_join(self, event: WorkerJoined) -> None:
        assert event.worker not in self._live, f"worker {event.worker} joined twice"
        incarnation = self._incarnations.get(event.worker, -1) + 1
        self._incarnations[event.worker] = incarnation
        self._live[event.worker] = None
        for recorder in self._recorders:
            recorder.joined(event.time, event.worker, incarnation)
        self._count_live(event.time)

    def _witness_loss(self, event: WorkerLost) -> Event | None:
        if event.worker not in self._live:
            return None
        del self._live[event.worker]
        flying = self._flying.pop(event.worker, None)
        gone = [] if flying is None else [flying]
        gone += [self._waiting.pop(number) for number in event.tickets if number in self._waiting]
        for ticket in gone:
            self._ledger.lose(ticket.batch)
        for recorder in self._recorders:
            recorder.lost(event.time, event.worker, tuple(gone))
        self._count_live(event.time)
        return event._replace(tickets=tuple(ticket.id for ticket in gone))

    def _refuse(self, time: float, ticket: Ticket) -> None:
        self._ledger.refuse(ticket.batch)
        for recorder in self._recorders:
            recorder.refused(time, ticket)
        self._refusals_in_a_row += 1
        if self._refusals_in_a_row >= REFUSALS_PER_WORKER * self._workers:
            raise Diverged(
                f"the last {self._refusals_in_a_row} gradients held NaN or Inf (version {self._version}); "
                f"lower the learning rate, clip the gradient (clip_norm), or look for bad samples"
            )

    def _count_live(self, time: float) -> None:
        if len(self._live) >= self._policy.needed:
            self._give_up_at = None
        elif self._give_up_at is None:
            self._give_up_at = time + self._patience_s

    # ------------------------------------------------------------ actions

    def _carry_out(self, time: float, actions: Iterable[Action]) -> float:
        """Carry out the policy's actions; returns the time when all are done."""
        actions = iter(actions)
        decided = time
        for action in actions:
            kind = type(action)
            if kind is Start:
                self._start(time, action)  # type: ignore[arg-type]
            elif kind is Apply:
                try:
                    time = self._apply(time, action)  # type: ignore[arg-type]
                except (Exception, EvaluationCutOff):
                    self._leave_over(actions, self.last_time - decided)
                    raise
                if self._over:
                    self._leave_over(actions, time - decided)
                    return time
            elif kind is Cancel:
                self._cancel(time, action)  # type: ignore[arg-type]
            elif kind is Drop:
                self._drop(time, action)  # type: ignore[arg-type]
            elif kind is Choose:
                for recorder in self._recorders:
                    recorder.chose(time, self._version, *action)
            elif kind is SetTimer:
                at, key, reason = action  # type: ignore[misc]
                at += time - decided  # type: ignore[operator]  # a limit does not run while a version is made
                self._engine.set_timer(at, key)  # type: ignore[arg-type]
                for recorder in self._recorders:
                    recorder.timer_set(time, at, key, reason)  # type: ignore[arg-type]
            else:
                raise self._wrong(f"gives {action!r}, which is no action")
        return time

    def _leave_over(self, actions: Iterable[Action], late_s: float) -> None:
        """Keep the remaining actions for a resumed run; timers are moved by the time that the version took."""
        self._left_over = [one._replace(at=one.at + late_s) if type(one) is SetTimer else one for one in actions]

    def _start(self, time: float, action: Start) -> None:
        worker, version, round = action
        if worker not in self._live or worker in self._flying:
            raise self._wrong(f"starts worker {worker}, which is {'at work' if worker in self._live else 'not there'}")
        if not 0 <= self._version - version <= self._history:
            raise self._wrong(f"starts worker {worker} on version {version}; its history is {self._history}")
        loan = self._ledger.borrow(round, worker)
        if loan is None:
            for recorder in self._recorders:
                recorder.exhausted(time, worker)
            self._pending.append(Exhausted(time, worker))
            return
        batch, samples, pinned = loan
        number = self._next_ticket
        self._next_ticket = number + 1
        ticket = Ticket(number, worker, self._incarnations[worker], version, batch, samples)
        self._flying[worker] = ticket
        for recorder in self._recorders:
            recorder.started(time, ticket)
        if not self._engine_is_away:
            self._engine.start(ticket)
        if pinned:
            for recorder in self._recorders:
                recorder.pinned(time, ticket)
            self._pending.append(Pinned(time, ticket))

    def _apply(self, time: float, action: Apply) -> float:
        """Make a version; returns the time when it is made and `after_update` has returned."""
        tickets, weights, reason = action
        waiting = self._waiting
        if not tickets or (weights is not None and (not self._policy.weighs or len(weights) != len(tickets))):
            raise self._wrong("makes an update of no gradient, or of weights without weighs = True and one a ticket")
        for ticket in tickets:
            if waiting.pop(ticket[0], None) is None:
                raise self._wrong(f"applies ticket {ticket[0]}, which does not wait to be applied")
        outcome = self._engine.apply(tickets, weights, reason)
        time = self._engine.now(time)
        if outcome.refused:
            for ticket in outcome.refused:
                self._refuse(time, ticket)
            kept = [index for index, ticket in enumerate(tickets) if ticket not in outcome.refused]
            weights = None if weights is None else tuple(weights[index] for index in kept)
            tickets = tuple(tickets[index] for index in kept)
            reason = f"{reason}, less {len(outcome.refused)} that held NaN or Inf"
        if tickets:
            self._refusals_in_a_row = 0
        self._ledger.spend(tickets)
        self._version += 1
        if self._give_up_at is not None:
            self._give_up_at = time + self._patience_s
        norms = outcome.norms
        if norms is not None and (outcome.refused or not norms.is_usable):
            norms = None  # a refused gradient may be part of them
        noise_scale = None
        if norms is not None:
            self._noise.add(norms)
            noise_scale = self._noise.value
            if noise_scale is not None and self._policy.wants_noise:
                self._pending.append(Learned(time, self._version, noise_scale))
        noise = norms, noise_scale
        update = Update(self._version, tickets, weights, reason, outcome.loss, outcome.norm, outcome.apply_s, *noise)
        for recorder in self._recorders:
            recorder.applied(time, update)
        self.last_time, self._over = time, BROKE_OFF  # it stays so if `after_update` raises
        self._over = self._after_update(self._version, time, outcome.loss)
        return self._engine.now(time)

    def _cancel(self, time: float, action: Cancel) -> None:
        if action.worker not in self._flying:
            raise self._wrong(f"cancels the work of worker {action.worker}, which is not at work")
        ticket = self._flying.pop(action.worker)
        self._ledger.give_back(ticket.batch)
        if not self._engine_is_away:
            self._engine.cancel(ticket)
        for recorder in self._recorders:
            recorder.cancelled(time, ticket, action.reason)

    def _drop(self, time: float, action: Drop, give_back: Callable[[int], None] | None = None) -> None:
        if action.ticket.id not in self._waiting:
            raise self._wrong(f"drops ticket {action.ticket.id}, which does not wait to be applied")
        ticket = self._waiting.pop(action.ticket.id)
        (give_back or self._ledger.give_back)(ticket.batch)
        if not self._engine_is_away:
            self._engine.drop(ticket)
        for recorder in self._recorders:
            recorder.dropped(time, ticket, action.reason)

    def _end_open_tickets(self, time: float) -> None:
        """Every ticket ends: those still open when the run is over are cancelled or dropped."""
        for ticket in list(self._flying.values()):
            self._cancel(time, Cancel(ticket.worker, "the run is over"))
        for ticket in list(self._waiting.values()):
            self._drop(time, Drop(ticket, "the run is over"))

    # ------------------------------------------------------------ checkpoints

    def _can_be_saved(self) -> bool:
        """Whether a run can resume from this end. An update that was decided but not made could not be made again."""
        if self._over is None:
            return True  # all data is used up; the pending events only say that workers found no batch
        only_learned = all(isinstance(event, Learned) for event in self._pending)  # `state` saves these
        return only_learned and not any(isinstance(action, Apply) for action in self._left_over)

    @property
    def can_be_saved(self) -> bool:
        """Whether a run can resume after an exception: it was at rest, or `after_update` raised."""
        return self.is_waiting or (self._over == BROKE_OFF and self._can_be_saved())

    def call_at_rest(self, callback: Callable[[float], None]) -> None:
        """Call `callback` with the time as soon as every decision made so far is carried out."""
        self._at_rest = callback

    def end_at_rest(self, reason: str) -> None:
        """End the run as soon as every decision made so far is carried out."""
        self._end_at_rest = reason

    def state(self, time: float) -> dict[str, Any]:
        """The protocol state that a resumed run needs, as JSON values; only at rest or at the end."""
        return {
            "time": time,
            "over": self._over or (DATA_USED_UP if self._ledger.finished else None),
            "version": self._version,
            "next_ticket": self._next_ticket,
            "incarnations": pack(self._incarnations),
            "live": list(self._live),
            "flying": pack(list(self._flying.values())),
            "waiting": pack(list(self._waiting.values())),
            "left_over": [pack_action(action) for action in self._left_over],
            "learned": [list(event) for event in self._pending if isinstance(event, Learned)],
            "exhausted": [list(event) for event in self._pending if isinstance(event, Exhausted)],
            "refusals_in_a_row": self._refusals_in_a_row,
            "noise": self._noise.state(),
            "policy": self._policy.state(),
            "ledger": self._ledger.state(),
        }

    def resume(self, state: dict[str, Any], over: str | None = None) -> None:
        """Continue from a state. Open tickets are lost, as if every worker had died at that moment.

        The losses are ordinary events: they are in the trace, the policy hears of them, and the batches go back to
        the ledger. So the whole trace is the trace of one run, and can be replayed as one.

        over: why the run was over in this state. No worker is lost then: `run` only brings the run to its end.
        """
        self._policy.restore(state["policy"])
        self._ledger.restore(state["ledger"])
        if "noise" in state:  # not in checkpoints of older releases
            self._noise.restore(state["noise"])
        self.last_time = time = state["time"]
        self._version, self._next_ticket = state["version"], state["next_ticket"]
        self._incarnations = unpack(state["incarnations"])
        self._live = dict.fromkeys(state["live"])
        self._flying = {ticket.worker: ticket for ticket in unpack(state["flying"])}
        self._waiting = {ticket.id: ticket for ticket in unpack(state["waiting"])}
        self._refusals_in_a_row = state["refusals_in_a_row"]
        self._pending.extend(Learned(*event) for event in state.get("learned", ()))
        self._pending.extend(Exhausted(*event) for event in state.get("exhausted", ()))
        self._engine_is_away = True
        left_over = [unpack_action(action) for action in state["left_over"]]
        if over is not None or self._ledger.finished:
            self._over, self._left_over = over, left_over
            return
        self._carry_out(time, left_over)
        self._settle_pending()
        for worker in list(self._live):
            # The first loss takes all arrivals with it, so that no arrival is left that could be applied.
            heard = self._witness_loss(WorkerLost(time, worker, tuple(self._waiting)))
            if heard is not None:
                self._carry_out(time, self._policy.handle(heard))
            self._settle_pending()
        self._engine_is_away = False

    def _settle_pending(self) -> None:
        while self._pending:
            event = self._pending.popleft()
            self._carry_out(event.time, self._policy.handle(event))
