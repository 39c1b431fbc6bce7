"""The one loop: next event from the engine → policy → carry out the actions → write the trace.

It never touches a gradient: tensors stay where the engine has them, and actions name tickets. It keeps the
laws that do not depend on the policy: every ticket ends exactly once, every batch goes back to the ledger or
is spent, arrivals of a worker's older life are refused, and a run that cannot go on says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quorate.engines.base import Engine
from quorate.errors import Diverged, QuorumLost
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
    Start,
    Ticket,
    Timer,
    WorkerJoined,
    WorkerLost,
)
from quorate.ledger import Ledger
from quorate.noise import NoiseScale
from quorate.policies import Policy
from quorate.policies._state import pack, pack_action, unpack, unpack_action
from quorate.stopping import Stop
from quorate.trace import Recorder, Update

#: Refused gradients in a row, per worker, after which a run counts as diverged.
REFUSALS_PER_WORKER = 10

#: How often to look whether somebody wants the run to end, and how long an update may take then, at least.
_LOOK_UP_S, _FINISH_S = 0.2, 5.0

LIMIT_REACHED, DATA_USED_UP = "limit reached", "data used up"

#: Why a ticket ends whose worker is on another batch; a replay knows such a cancelling by it.
REBOUND = "rebound: its worker was on another batch"

#: Called after each version with (version, time, loss); a reason ends the run.
AfterUpdate = Callable[[int, float, float | None], str | None]


class Coordinator:
    """Runs a policy on an engine until somebody says that it is enough."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        ledger: Ledger,
        recorders: Sequence[Recorder],
        *,
        workers: int,
        after_update: AfterUpdate,
        patience_s: float,
        at_end: Callable[[float], None] | None = None,
        stop: Stop | None = None,
    ) -> None:
        self._policy = policy.begin(workers)
        self._engine = engine
        self._ledger = ledger
        self._recorders = tuple(recorders)
        self._after_update = after_update
        self._patience_s = patience_s
        self._at_end = at_end  # called when the run is over, before what is open is dropped
        self._stop = stop
        self._workers = workers
        self.last_time = 0.0  # of the last event
        self.is_waiting = False  # for an event: every decision made so far is carried out
        self._version = 0
        self._next_ticket = 0
        self._incarnations: dict[int, int] = {}
        self._live: dict[int, None] = {}
        self._flying: dict[int, Ticket] = {}  # worker -> the ticket it computes
        self._waiting: dict[int, Ticket] = {}  # ticket number -> arrived, not yet applied or dropped
        self._pending: deque[Event] = deque()  # what follows from our own actions; comes before the engine's
        self._refusals_in_a_row = 0
        self._noise = NoiseScale()
        self._give_up_at: float | None = None  # while too few workers are alive: how long to wait for more
        self._over: str | None = None  # why the run is over
        self._left_over: list[Action] = []  # what the policy wanted when the run was over
        self._at_rest: Callable[[float], None] | None = None
        self._end_at_rest: str | None = None
        self._stop_by: float | None = None  # once the end is asked for: when not to wait for the update any more
        self._engine_is_away = False  # while a resumed run catches up with what was lost

    @property
    def version(self) -> int:
        """How many updates were made."""
        return self._version

    @property
    def why_over(self) -> str:
        """What ended the run: a limit that was set, or that all epochs were used up."""
        return self._over or DATA_USED_UP

    def run(self) -> float:
        """Go on until `after_update` ends the run or the ledger is finished; gives the time of the end."""
        engine, handle, pending, ledger = self._engine, self._policy.handle, self._pending, self._ledger
        flying, waiting, recorders = self._flying, self._waiting, self._recorders
        time = self.last_time
        talking_to_itself = 0
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
                talking_to_itself += 1
                if talking_to_itself > 4 * len(self._live) + 100:
                    raise self._stands_still()
            else:
                self.is_waiting = True
                upcoming = engine.next_event(self._give_up_at if self._stop is None else self._look_up_at(time))
                if upcoming is None:
                    if self._stop is not None and self._may_wait_on(time):
                        continue
                    raise self._why_nothing_happens(time)
                self.is_waiting = False
                event = upcoming
                talking_to_itself = 0
            self.last_time = time = event.time
            if type(event) is Arrived:  # here rather than in `_witness`: it is nearly every event
                _, ticket, parts = event
                if flying.get(ticket.worker) is not ticket:
                    continue  # cancelled, or of an older life of its worker: it has ended already
                del flying[ticket.worker]
                waiting[ticket.id] = ticket
                for recorder in recorders:
                    recorder.arrived(time, ticket, parts)
                actions = handle(event)
            else:
                heard = self._witness(event)
                actions = handle(heard) if heard is not None else []
            if actions:
                time = self._carry_out(time, actions)
        if self._at_end is not None and self._can_be_saved():
            self._at_end(time)
        self._end_open_tickets(time)
        engine.settle()
        return time

    # ------------------------------------------------------------ events

    def _look_up_at(self, time: float) -> float:
        """Until when to wait for an event before looking whether somebody wants the run to end."""
        soon = self._engine.now(time) + _LOOK_UP_S
        return soon if self._give_up_at is None else min(self._give_up_at, soon)

    def _may_wait_on(self, time: float) -> bool:
        """Nothing has happened for a moment. Whoever asked for the end waits for the update, but not for ever."""
        assert self._stop is not None
        now = self._engine.now(time)
        if self._stop.reason is not None:
            if self._stop_by is None:
                self._stop_by = now + max(_FINISH_S, 5 * now / max(1, self._version))
            if self._stop.at_once or self._give_up_at is not None or now >= self._stop_by:
                self._over = self._stop.reason
        return self._over is not None or self._give_up_at is None or now < self._give_up_at

    def _why_nothing_happens(self, now: float) -> Exception:
        if self._give_up_at is None:
            return self._stands_still()
        return QuorumLost(
            f"{self._policy.name} needs {self._policy.needed} live workers, but only {len(self._live)} of "
            f"{self._workers} are left at {now:.6g} s (version {self._version}), and none came back within "
            f"{self._patience_s:g} s; lower the quorum, take more backups, or wait longer (patience)"
        )

    def _stands_still(self) -> AssertionError:
        return AssertionError(f"{self._policy!r} stands still at version {self._version}: this is a bug in it")

    def _witness(self, event: Event) -> Event | None:
        """Note what happened, other than an arrival; gives what the policy hears of it, if anything."""
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
                assert version == self._version, "nobody starts on a version that is over"
                self._cancel(event.time, Cancel(worker, REBOUND))
                self._start(event.time, Start(worker, version, version))
            return None
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
        """Do what the policy decided; gives the time when all is done."""
        actions = iter(actions)
        decided = time
        for action in actions:
            kind = type(action)
            if kind is Start:
                self._start(time, action)  # type: ignore[arg-type]
            elif kind is Apply:
                time = self._apply(time, action)  # type: ignore[arg-type]
                if self._over:
                    self._left_over = list(actions)
                    return time
            elif kind is Cancel:
                self._cancel(time, action)  # type: ignore[arg-type]
            elif kind is Drop:
                self._drop(time, action)  # type: ignore[arg-type]
            elif kind is Choose:
                for recorder in self._recorders:
                    recorder.chose(time, self._version, *action)
            else:
                at, key, reason = action  # type: ignore[misc]
                at += time - decided  # type: ignore[operator]  # a limit does not run while a version is made
                self._engine.set_timer(at, key)  # type: ignore[arg-type]
                for recorder in self._recorders:
                    recorder.timer_set(time, at, key, reason)  # type: ignore[arg-type]
        return time

    def _start(self, time: float, action: Start) -> None:
        worker, version, round = action
        assert worker in self._live and worker not in self._flying, f"{action} for a worker that is not free"
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
        """Make a version; gives the time when it is made and looked at."""
        tickets, weights, reason = action
        waiting = self._waiting
        for ticket in tickets:
            del waiting[ticket[0]]
        outcome = self._engine.apply(tickets, weights)
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
            norms = None  # what was left out may have been in them
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
        self._over = self._after_update(self._version, time, outcome.loss)
        return self._engine.now(time)

    def _cancel(self, time: float, action: Cancel) -> None:
        ticket = self._flying.pop(action.worker)
        self._ledger.give_back(ticket.batch)
        if not self._engine_is_away:
            self._engine.cancel(ticket)
        for recorder in self._recorders:
            recorder.cancelled(time, ticket, action.reason)

    def _drop(self, time: float, action: Drop) -> None:
        ticket = self._waiting.pop(action.ticket.id)
        self._ledger.give_back(ticket.batch)
        if not self._engine_is_away:
            self._engine.drop(ticket)
        for recorder in self._recorders:
            recorder.dropped(time, ticket, action.reason)

    def _end_open_tickets(self, time: float) -> None:
        """Every ticket ends: what is still open when the run is over is dropped."""
        for ticket in list(self._flying.values()):
            self._cancel(time, Cancel(ticket.worker, "the run is over"))
        for ticket in list(self._waiting.values()):
            self._drop(time, Drop(ticket, "the run is over"))

    # ------------------------------------------------------------ checkpoints

    def _can_be_saved(self) -> bool:
        """Whether this end is one to go on from: an update decided but not made could not be made again."""
        if self._over is None:
            return True  # all data is used up; that workers found none is what is pending
        only_learned = all(isinstance(event, Learned) for event in self._pending)  # which are saved too
        return only_learned and not any(isinstance(action, Apply) for action in self._left_over)

    def call_at_rest(self, callback: Callable[[float], None]) -> None:
        """Call this with the time as soon as every decision made so far is carried out."""
        self._at_rest = callback

    def end_at_rest(self, reason: str) -> None:
        """End the run as soon as every decision made so far is carried out."""
        self._end_at_rest = reason

    def state(self, time: float) -> dict[str, Any]:
        """Everything a resumed run needs of the protocol, as JSON values; only at rest or at the end."""
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
            "refusals_in_a_row": self._refusals_in_a_row,
            "noise": self._noise.state(),
            "policy": self._policy.state(),
            "ledger": self._ledger.state(),
        }

    def resume(self, state: dict[str, Any], over: str | None = None) -> None:
        """Continue from a state: what was under way is lost, as if every worker had died at that moment.

        The losses are events like any other: they are in the trace, the policy hears of them, and the batches
        go back to the ledger. So the whole trace is that of one run, and can be replayed as one.

        over: why the run was over in this state. Nothing goes on then, so nothing is lost: `run` brings it to its end.
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
        self._engine_is_away = True
        left_over = [unpack_action(action) for action in state["left_over"]]
        if over is not None or self._ledger.finished:
            self._over, self._left_over = over, left_over
            return
        self._carry_out(time, left_over)
        self._settle_pending()
        for worker in list(self._live):
            # The first loss takes all arrivals with it, so that nothing is left that could be applied.
            heard = self._witness_loss(WorkerLost(time, worker, tuple(self._waiting)))
            if heard is not None:
                self._carry_out(time, self._policy.handle(heard))
            self._settle_pending()
        self._engine_is_away = False

    def _settle_pending(self) -> None:
        while self._pending:
            event = self._pending.popleft()
            self._carry_out(event.time, self._policy.handle(event))
