"""Processes that draw their batches from a lending ledger, around the real coordinator, in any order of events.

Each number of `choices` picks what happens next: a message arrives somewhere, a process goes on, time passes. When they
are used up, everybody is fair. Messages of one connection stay in their order; nothing else does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from quorate.coordinator import Coordinator
from quorate.data_parallel.batches import BatchBorrower, LendingLedger, Lent, Now
from quorate.data_parallel.engine import CollectiveEngine
from quorate.engines.base import Job
from quorate.events import Event, Rebound
from quorate.learner import Learning
from quorate.policies import Policy
from quorate.trace import Recorder

MOST_EVENTS = 20_000


class Process:
    """One process as its script sees it: it takes batches, computes them in their order, and steps.

    ahead: how many batches its DataLoader has loaded beyond the one that is computed.
    refuses: every so many gradients hold NaN (0: none).
    leaves: after every so many iterations the script leaves its loop, and begins another (0: never).
    """

    def __init__(
        self, worker: int, late: str, *, ahead: int, passes: int, refuses: int, epoch: int, leaves: int = 0
    ) -> None:
        self._leaves = leaves
        self.worker, self._late, self._ahead, self._passes, self._refuses = worker, late, ahead, passes, refuses
        self.borrowing = BatchBorrower(epoch)
        self.inbox: deque[dict[str, Any]] = deque()
        self.outbox: deque[dict[str, Any]] = deque()
        self.decided = 0  # the newest version that it knows will be made
        self.made = 0  # by its communication thread
        self.version = 0  # that it computes on
        self.members: dict[int, list[int]] = {}
        self._loaded: deque[int] = deque()
        self._asking = self._pass_is_over = self._has_begun = False
        self._waits_for: int | None = None  # in step(): until this version is made
        self._meets = False
        self.finished = False
        self.ends: list[int] = []  # the version after each pass
        self.computed = 0
        self.applied: list[int] = []  # batches, by its own account

    def _say(self, kind: str, **fields: Any) -> None:
        self.outbox.append({"kind": kind, **fields})

    def hear(self) -> None:
        message = self.inbox.popleft()
        if message["kind"] == "go":
            self.decided = message["version"]
            self.members[self.decided] = message["members"]
        elif message["kind"] == "over":
            self.finished = True
        elif message["kind"] == "met":
            assert self._meets and message["version"] == self.decided
            self._meets = False
            self._catch_up(self.decided)
            self._end_pass()
        else:
            self.borrowing.heard(message)

    def make(self) -> bool:
        """Take part in the next all-reduce."""
        can = self.made < self.decided
        self.made += can
        return can

    def go_on(self) -> bool:
        """Do the next thing, if that can be done."""
        if self.finished or self._meets:
            return False
        if self._waits_for is not None:
            return self.leave_step()
        if not self._pass_is_over and len(self._loaded) <= self._ahead:
            taken = self._load()
            if taken or not self._loaded or self._asking:
                return taken
        if self._loaded:
            return self._compute()
        assert self.borrowing.pass_is_over
        self._meets = True
        self._say("meet", lacking=False)
        return True

    def _end_pass(self) -> None:
        self.ends.append(self.version)
        self._pass_is_over = False
        self._passes -= 1
        self.borrowing.begin_pass()
        if not self._passes:
            self._say("finished")
            self.finished = True

    def _load(self) -> bool:
        asked_ahead = self.borrowing.in_hand is not None
        if not self._asking:
            self._asking = True
            question = self.borrowing.question()
            if question is not None:
                self._say("want", **question)
                return True
        taken = self.borrowing.take()
        if taken is Now.WAIT:
            return False
        self._asking = False
        if not isinstance(taken, Lent):
            self._pass_is_over = True
            return True
        self._loaded.append(taken.batch)
        if not asked_ahead and taken.version is not None and taken.version > self.version:
            assert self.decided >= taken.version, "it was told of the version before it was lent the batch"
            self._catch_up(taken.version)
        return True

    def _compute(self) -> bool:
        assert self._loaded[0] == self.borrowing.in_hand
        if self.borrowing.holds_echo:
            if self.borrowing.waits_in_echo:
                return False
            self._catch_up(self.version)
            self._end_step()
            return True
        if not self._has_begun:  # forward
            self._has_begun = True
            if self._late == "cancel":
                self._catch_up(self.version)
            self._say("began", version=self.version)
            return True
        self._has_begun = False
        self.computed += 1
        if self.decided > self.version:
            self._say("arrived" if self._late == "finish" else "abandoned", version=self.version)
            self._catch_up(self.version + 1)
            self._end_step()
        elif self._refuses and self.computed % self._refuses == 0:
            self._say("refused", version=self.version)
            self._end_step()
        else:
            self._say("arrived", version=self.version)
            self._waits_for = self.version + 1
        return True

    def leave_step(self) -> bool:
        if self._waits_for is None or self.made < self._waits_for:
            return False
        if self.worker in self.members[self._waits_for]:
            self.applied.append(self._loaded[0])
        self._catch_up(self._waits_for)
        self._waits_for = None
        self._end_step()
        return True

    def _catch_up(self, least: int) -> None:
        self.made = max(self.made, least)  # that is waited for
        self.version = self.made

    def _end_step(self) -> None:
        self._loaded.popleft()
        assert self.borrowing.computed()
        echoes_only = all(lent.is_echo for lent in self.borrowing._held)
        if self._leaves and self.computed % self._leaves == 0 and not (self._pass_is_over and echoes_only):
            self._loaded.clear()
            self._pass_is_over = self._asking = False
            self.borrowing.begin_pass()


class World(CollectiveEngine):
    """The coordinator, and around it processes instead of connections."""

    def __init__(self, processes: Sequence[Process], choices: Sequence[int]) -> None:
        super().__init__(len(processes), SimpleQueue(), self._tell_all, decides=True)
        self.processes = processes
        self._choices = deque(choices)
        self._turn = 0
        self._time = 0.0
        self._given = 0
        self.rebounds = 0

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        self.processes[worker].inbox.append(message)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for worker in range(self.workers):
            self.tell(worker, message)

    def next_event(self, until: float | None) -> Event | None:
        self._given += 1
        assert self._given < MOST_EVENTS, "no end in sight"
        event = super().next_event(None)
        self.rebounds += type(event) is Rebound
        return event

    # ------------------------------------------------------------ in place of sockets and a clock

    def _clock(self) -> float:
        return self._time

    def _wait_for(self, version: int) -> None:
        self._made[version] = 0.0

    def _next_message(self, timeout_s: float | None) -> tuple[float, int, dict[str, Any]] | None:
        while True:
            choice = self._choices.popleft() if self._choices else None
            if choice is not None and choice % 13 == 0:
                self._time += 1.0
                if timeout_s is not None:
                    return None
            said = self._next_thing(choice)
            if said is None:
                assert timeout_s is not None, "everybody waits, for ever"
                self._time += timeout_s
                return None
            if isinstance(said, tuple):
                self._time += 0.25
                return self._began + self._time, *said

    def _next_thing(self, choice: int | None) -> bool | tuple[int, dict[str, Any]] | None:
        """What the choice says, or what is next: a message to the coordinator, True (done), or None (nothing)."""
        count = 4 * self.workers
        first = self._turn if choice is None else choice
        self._turn += 1
        for number in range(first, first + count):
            process, kind = self.processes[number % count // 4], number % 4
            if kind == 0 and process.outbox:
                return process.worker, process.outbox.popleft()
            if kind == 1 and process.inbox:
                process.hear()
                return True
            if (kind == 2 and process.go_on()) or (kind == 3 and process.make()):
                return True
        return None


def run_world(
    policy: Policy,
    choices: Sequence[int],
    recorders: Sequence[Recorder] = (),
    *,
    ahead: Sequence[int],
    passes: int = 2,
    samples: int = 23,
    batch_size: int = 2,
    refuses: int = 0,
    leaves: int = 0,
    state: dict[str, Any] | None = None,
    updates: int | None = None,
) -> tuple[World, LendingLedger, Counter[int]]:
    """Run the processes' scripts to their end; gives also how often each batch was applied, by their own account.

    state: of a ledger to go on from. updates: end after so many.
    """
    epoch = 0 if state is None else state["epoch"]
    processes = [
        Process(worker, policy.late, ahead=depth, passes=passes - epoch, refuses=refuses, epoch=epoch, leaves=leaves)
        for worker, depth in enumerate(ahead)
    ]
    world = World(processes, choices)
    ledger = LendingLedger(samples, batch_size, len(ahead), world.tell, seed=7)
    if state is not None:
        ledger.restore(state)
    world.open(Job(task=None, policy=policy, ledger=ledger, learning=Learning(), seed=7))
    coordinator = Coordinator(
        policy,
        world,
        ledger,
        recorders,
        after_update=lambda version, *_: "enough" if version == updates else None,
        patience_s=1e9,
        stop=world.ending,
    )
    time = coordinator.run()
    for recorder in recorders:
        recorder.ended(time, coordinator.version, coordinator.why_over, None)
    for process in processes:  # what was decided last may not have reached them yet
        while process.inbox:
            process.hear()
        process.made = process.decided
        process.leave_step()
    return world, ledger, Counter(batch for process in processes for batch in process.applied)
