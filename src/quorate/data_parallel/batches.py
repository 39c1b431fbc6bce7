"""Which batch each process computes: the coordinator's ledgers, and each process's side of them.

Under full and delayed sync every worker is in every round, so the round alone assigns the batches: `FixedLedger` and
`FixedBatches`.

Under a quorum the policy drops gradients, so batches are lent one by one ahead of their tickets, and dropped batches
come back. `LendingLedger` is the lender, in worker 0's process with the coordinator. `BatchBorrower` is the borrower,
in every process. The borrower has no threads and sends nothing: it takes messages and returns actions;
`quorate.Sampler` waits and sends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.ledger import Ledger, Loan


class BatchAssignment:
    """In round r of an epoch, worker w has batch r·workers + w of the remaining batches of that epoch.

    epoch, used: the epoch in which the run starts, and the number of its batches that were used before, perhaps by
        another number of workers. Rounds are counted from there.
    """

    def __init__(self, batches: int, workers: int, epoch: int = 0, used: int = 0) -> None:
        if batches < workers:
            raise BadInput(
                f"an epoch has {batches} batches, but there are {workers} workers, and each needs at least one; "
                f"choose a smaller batch_size"
            )
        self.batches, self.workers, self.epoch, self._used = batches, workers, epoch, used
        self._rounds = math.ceil(batches / workers)  # of an epoch
        self._first_rounds = math.ceil((batches - used) / workers)  # of the first epoch

    def batch(self, round: int, worker: int) -> int | None:
        """The batch of a worker in a round, counted over all epochs; None if the worker sits that round out."""
        epoch, used = self.place(round)
        return epoch * self.batches + used + worker if used + worker < self.batches else None

    def place(self, round: int) -> tuple[int, int]:
        """The epoch of a round, and the number of batches of that epoch used before the round."""
        if round < self._first_rounds:
            return self.epoch, self._used + round * self.workers
        epoch, place = divmod(round - self._first_rounds, self._rounds)
        return self.epoch + 1 + epoch, place * self.workers

    def end_of_epoch(self, round: int) -> int:
        """The first round after this round's epoch."""
        return self._first_rounds + (self.place(round)[0] - self.epoch) * self._rounds

    def is_uneven(self) -> bool:
        """Whether some workers have no batch in the last round of an epoch."""
        return self.batches % self.workers != 0 or self._used % self.workers != 0

    def count(self, worker: int) -> int:
        """The number of batches that a worker has in an epoch."""
        return len(range(worker, self.batches, self.workers))


class FixedLedger(Ledger):
    """The coordinator's side: lends each worker its assigned batch of the round; no batch ever comes back."""

    def __init__(
        self, samples: int, batch_size: int, workers: int, seed: int = 0, epoch: int = 0, used: int = 0
    ) -> None:
        super().__init__(samples, batch_size, None, seed)
        assert self.batches_per_epoch is not None
        self._assignment = BatchAssignment(self.batches_per_epoch, workers, epoch, used)

    def borrow(self, round: int | None, worker: int | None = None) -> Loan | None:
        assert round is not None and worker is not None
        batch = self._assignment.batch(round, worker)
        if batch is None:
            return None
        self._out += 1
        return Loan(batch, self.size(batch), False)


class FixedBatches:
    """A process's side: the batches of one worker, and its progress."""

    runs_on = False  # as in `BatchBorrower`; no batch is dropped here

    def __init__(self, assignment: BatchAssignment, worker: int) -> None:
        self.assignment, self._worker = assignment, worker
        self.round = 0  # the next one in which this worker has a batch
        self._handed: deque[int] = deque()  # handed out and not computed yet
        self._computed = 0  # batches of this pass
        self._ahead = 1  # batches handed out when the first batch of this pass was computed
        self._pass_is_whole = False

    @property
    def epoch(self) -> int:
        return self.assignment.place(self.round)[0]

    @property
    def in_hand(self) -> int | None:
        """The batch that the process computes now, or next."""
        return self._handed[0] if self._handed else None

    @property
    def pass_is_over(self) -> bool:
        """Whether all batches of the pass are handed out and computed."""
        return self._pass_is_whole and not self._handed

    def sits_out(self, round: int) -> bool:
        return self.assignment.batch(round, self._worker) is None

    def rest_of_epoch(self) -> Iterator[int]:
        """The batches of a pass: the rest of the current epoch."""
        # After a script left its loop early, fewer batches are uncomputed than its loader had loaded ahead.
        if self._pass_is_whole and self._computed and len(self._handed) >= self._ahead:
            raise BadInput(
                f"the last pass had {len(self._handed) + self._computed} batches, but optimizer.step() was called only "
                f"{self._computed} times; if several batches make a step, say how many: Sampler(…, accumulate=…)"
            )
        self._handed.clear()
        self._computed, self._pass_is_whole = 0, False
        return self._hand_out(range(self.round, self.assignment.end_of_epoch(self.round)))

    def _hand_out(self, rounds: range) -> Iterator[int]:
        for round in rounds:
            batch = self.assignment.batch(round, self._worker)
            if batch is not None:
                self._handed.append(batch)
                yield batch
        self._pass_is_whole = True
        if not self._handed and not self._computed:
            self.round = rounds.stop  # all remaining batches of the epoch belong to other workers

    def computed(self) -> bool:
        """The batch in hand is done. False: there was no batch."""
        if not self._handed:
            return False
        if not self._computed:
            self._ahead = len(self._handed)
        self._handed.popleft()
        self._computed += 1
        self.round += 1
        while self.sits_out(self.round):
            self.round += 1
        return True


#: Sends a message to a worker's process.
Tell = Callable[[int, dict[str, Any]], None]


class _Held(NamedTuple):
    """A batch that is lent to a process."""

    batch: int
    floor: int | None  # the oldest version that the process may compute it on


class _InFlight(NamedTuple):
    version: int
    batch: int


@dataclass
class _WorkerLoans:
    """The batches that are lent to one worker, and its progress."""

    held: deque[_Held] = field(default_factory=deque)  # lent and not done, in the order of computation
    is_wasted: bool = False  # the worker computes the first one on a closed version; that batch is returned already
    version: int | None = None  # on which the worker computes the first one (None: not known yet)
    ticket: _InFlight | None = None
    has_ticket: bool = False  # so the coordinator will use the worker's next gradient
    has_ended: bool = False  # the worker's pass has ended: it takes no more batches of the epoch
    epoch: int = 0  # of the worker's current pass
    lent: int = 0  # batches lent so far


class LendingLedger(Ledger):
    """Lends batches to processes that compute them strictly in the order of their loans.

    A ticket borrows the oldest batch of its worker; a process that asks ahead holds further batches. The process
    reports from which version it continues (`began`) and when a batch is done (`done`). So the ledger knows whether
    the batch of a cancelled ticket was begun (its computation is wasted, and the batch returns to the queue) or not
    (the process keeps it). If such a report comes too late for a ticket that was just started, that ticket must be
    rebound: both methods then return True, and the engine emits a `Rebound` event.

    An epoch is over when all its batches were applied, or given up after NaN or Inf. Only then does the ledger lend
    batches of the next epoch, except to a process that is in the next epoch already: a process that asks ahead does
    not wait.
    """

    def __init__(self, samples: int, batch_size: int, workers: int, tell: Tell, *, seed: int = 0) -> None:
        super().__init__(samples, batch_size, None, seed)
        self._tell, self._workers = tell, workers
        self._loans = [_WorkerLoans() for _ in range(workers)]
        self._holder: dict[int, int] = {}  # batch -> the worker that computes it, or will, without waste
        self._tickets_on: dict[int, int] = {}  # batch -> number of its tickets
        self._borrower: dict[int, int] = {}  # batch -> the worker of these tickets
        assert self.batches_per_epoch is not None
        self._per_epoch: int = self.batches_per_epoch
        self.epoch = 0  # the oldest open one
        self._used: dict[int, int] = {}  # open epoch -> its batches that were applied or given up
        self._staying: int | None = None  # the worker that stays in the pass for returned batches

    # ------------------------------------------------------------ for the coordinator

    def borrow(self, round: int | None, worker: int | None = None) -> Loan | None:
        """The oldest batch that the worker holds and will compute on this version, or a new loan."""
        assert round is not None and worker is not None
        loans = self._loans[worker]
        if loans.held and not loans.is_wasted and loans.version is not None and loans.version < round:
            self._waste(loans)
        place = 1 if loans.is_wasted else 0
        if len(loans.held) > place:
            batch = loans.held[place].batch
        else:
            taken = self._take(loans)
            if taken is None:
                loans.has_ticket = False
                return None
            batch = taken
            if not loans.held:
                loans.version = None  # the worker holds no batch, so it continues from the version of this loan
            self._lend(worker, batch, None if loans.held else round)
        loans.ticket, loans.has_ticket = _InFlight(round, batch), True
        self._tickets_on[batch] = self._tickets_on.get(batch, 0) + 1
        self._borrower[batch] = worker
        return Loan(batch, self.size(batch), self._is_pinned(batch))

    def spend(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            del self._tickets_on[ticket.batch], self._borrower[ticket.batch]
        super().spend(tickets)
        self._use(ticket.batch for ticket in tickets)

    def give_back(self, batch: int) -> None:
        """Its ticket was cancelled or dropped: the batch is free, unless its process has not begun it yet."""
        worker = self._end_ticket(batch)
        if batch in self._tickets_on:
            return  # a newer ticket of the same worker has it
        loans = self._loans[worker]
        if self._holder.get(batch) != worker:
            super().give_back(batch)
        elif loans.held[0].batch == batch and loans.version is not None and not loans.is_wasted:
            self._waste(loans)

    def lose(self, batch: int) -> None:
        self._end_ticket(batch)
        if batch not in self._holder and batch not in self._tickets_on:
            super().lose(batch)

    def refuse(self, batch: int) -> bool:
        self._end_ticket(batch)
        again = super().refuse(batch)
        if not again:
            self._use([batch])
        return again

    def _end_ticket(self, batch: int) -> int:
        """Remove one ticket from this batch; returns the ticket's worker."""
        worker = self._borrower[batch]
        self._tickets_on[batch] -= 1
        if not self._tickets_on[batch]:
            del self._tickets_on[batch], self._borrower[batch]
            loans = self._loans[worker]
            if loans.ticket is not None and loans.ticket.batch == batch:
                loans.ticket = None
        return worker

    # ------------------------------------------------------------ messages of the processes

    def wanted(self, worker: int, total: int, epoch: int, ask: int, ahead: bool = False) -> None:
        """The worker's sampler wants `total` batches since the start; if none can be lent, it gets a "none" message.

        ask: the number of the question, which the answer repeats.
        ahead: the worker has a batch to compute, so its loader cannot wait. Its pass ends, unless this worker is the
            one that stays.
        """
        loans = self._loans[worker]
        loans.epoch, loans.has_ended = epoch, False
        # Only to a worker with a ticket: any other would compute its batch at once, and the gradient would go unused.
        while loans.has_ticket and loans.lent < total and (batch := self._take(loans)) is not None:
            self._lend(worker, batch, None)
        if loans.lent < total:  # it asks again, or waits for the loan with its next ticket
            stays = ahead and self._staying in (None, worker)
            if stays:
                self._staying = worker
            loans.has_ended = ahead and not stays
            self._tell(worker, {"kind": "none", "ask": ask, "stay": stays})

    def began(self, worker: int, version: int) -> bool:
        """The worker computes its oldest batch on this version. True: its ticket must be rebound."""
        loans = self._loans[worker]
        if loans.held and loans.held[0].floor is not None and version < loans.held[0].floor:
            return False  # sent before the worker got that batch; another report follows
        loans.version = version
        ticket = loans.ticket
        if not loans.held or loans.is_wasted or ticket is None or ticket.batch != loans.held[0].batch:
            return False
        if version >= ticket.version:
            return False
        self._waste(loans)
        return True

    def done(self, worker: int, version: int) -> bool:
        """The worker brought or abandoned its oldest batch, computed on this version. True: rebind its ticket.

        To be called before the coordinator gets the resulting event.
        """
        loans = self._loans[worker]
        if not loans.held:
            return False
        batch, _ = loans.held.popleft()
        is_wasted, loans.is_wasted, loans.version = loans.is_wasted, False, None
        if is_wasted:
            return False
        del self._holder[batch]
        if loans.ticket is not None and loans.ticket.batch == batch:
            if version < loans.ticket.version:
                return True
            loans.ticket = None
        elif batch not in self._tickets_on:
            super().give_back(batch)
        return False

    def left(self, worker: int) -> None:
        """The worker has left: its batches are free. To be called before the coordinator gets its `WorkerLost`."""
        loans = self._loans[worker]
        self._loans[worker] = _WorkerLoans()
        if self._staying == worker:
            self._staying = None
            for other in self._loans:  # batches that return now are for their next pass
                other.has_ended = False
        for batch in [held.batch for held in loans.held][1 if loans.is_wasted else 0 :]:
            del self._holder[batch]
            if batch not in self._tickets_on:
                super().lose(batch)

    @property
    def newest_epoch(self) -> int:
        """The newest epoch with a lent batch or a process in it."""
        return max(self.epoch, (self._next - 1) // self._per_epoch, *(loans.epoch for loans in self._loans))

    # ------------------------------------------------------------ lending

    def _lend(self, worker: int, batch: int, floor: int | None) -> None:
        loans = self._loans[worker]
        loans.held.append(_Held(batch, floor))
        loans.lent += 1
        self._holder[batch] = worker
        self._tell(worker, {"kind": "lent", "batch": batch, "epoch": batch // self._per_epoch, "version": floor})

    def _take(self, loans: _WorkerLoans) -> int | None:
        """The next free batch: a returned one, else a fresh one, else a refused one."""
        if loans.has_ended and loans.epoch >= self.epoch:
            return None
        has_fresh = self._next < (max(loans.epoch, self.epoch) + 1) * self._per_epoch
        if self._returned:
            batch = self._returned.popleft()
            own = loans.held[0].batch if loans.is_wasted else None
            if batch == own and (self._returned or has_fresh):
                # A faster worker should get the batch that this worker was too slow for.
                other = self._returned.popleft() if self._returned else self._fresh()
                self._returned.appendleft(batch)
                batch = other
        elif has_fresh:
            batch = self._fresh()
        elif self._set_aside:
            batch = self._set_aside.popleft()
        else:
            return None
        self._out += 1
        return batch

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1

    def _waste(self, loans: _WorkerLoans) -> None:
        """The worker computes its first batch on a closed version: the batch returns."""
        loans.is_wasted = True
        batch = loans.held[0].batch
        del self._holder[batch]
        if batch not in self._tickets_on:
            super().give_back(batch)

    def _use(self, batches: Iterable[int]) -> None:
        """These batches were applied or given up; tell all workers if that ends an epoch."""
        for batch in batches:
            epoch = batch // self._per_epoch
            self._used[epoch] = self._used.get(epoch, 0) + 1
        while self._used.get(self.epoch) == self._per_epoch:
            del self._used[self.epoch]
            for worker in range(self._workers):
                self._tell(worker, {"kind": "epoch_over", "epoch": self.epoch})
            self.epoch += 1
            self._staying = None

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The state as JSON values. Lent batches count as returned: after a restart there are no loans."""
        lent = self._holder.keys() | self._tickets_on.keys()
        return {
            **super().state(),
            "epoch": self.epoch,
            "used": [list(pair) for pair in self._used.items()],
            "returned": sorted(lent) + list(self._returned),
            "out": 0,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.epoch, self._used = state["epoch"], dict(state["used"])
        self._loans = [_WorkerLoans() for _ in range(self._workers)]
        self._holder, self._tickets_on, self._borrower = {}, {}, {}


LAST = 1 << 60  # an epoch that is never reached


class Lent(NamedTuple):
    """A batch that this process may compute."""

    batch: int
    epoch: int
    version: int | None  # the oldest version that it may be computed on
    is_echo: bool = False  # not a loan: it keeps a loader in the pass while there is no batch


class Now(Enum):
    """The sampler's action when it gets no batch."""

    WAIT = "a batch may still come"
    END = "the pass is over"


class BatchBorrower:
    """The loans of this process, according to the messages that it received."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch  # of the current pass, or the next one
        self._ready: deque[Lent] = deque()
        self._held: deque[Lent] = deque()  # handed out and not done
        self._lent = 0  # batches lent so far
        self._epoch_over = -1
        self._over = False
        self.runs_on = False  # passes end without waiting: a batch dropped at their end comes in a later pass
        self._has_strayed = False  # passes did not wait, so other processes may be in other epochs
        self._is_empty = True  # no batch of the pass was handed out
        self._has_ended = False  # no more batches of the pass are handed out
        self._ask = 0  # number of the last question
        self._none_for = 0  # number of the last question with the answer "none"
        self._stays = False  # batches that return in this pass are for this process
        self._asked_total = 0

    def heard(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "lent":
            self._lent += 1
            self._ready.append(Lent(message["batch"], message["epoch"], message["version"]))
        elif kind == "none":
            self._none_for, self._stays = message["ask"], message["stay"]
        elif kind == "epoch_over":
            self._epoch_over = max(self._epoch_over, message["epoch"])
        elif kind == "met" and self._has_strayed and not self.runs_on:
            self.epoch, self._has_strayed = max(self.epoch, message["epoch"]), False
        elif kind == "over":
            self._over = True

    def run_on(self, on: bool) -> dict[str, Any] | None:
        """Let passes end without waiting when the epoch of the loans changes; returns the `want` to send, if any."""
        self.runs_on, self._has_strayed = on, True
        return None if on else {"total": 0, "epoch": self.epoch, "ask": self._ask}

    def question(self) -> dict[str, Any] | None:
        """The `want` to send for one more batch; None if a batch is ready or was already asked for."""
        total = self._lent + 1
        if self._ready or (total <= self._asked_total and self._none_for < self._ask):
            return None
        self._ask += 1
        self._asked_total = total
        newest = LAST if self.runs_on else self.epoch
        return {"total": total, "epoch": newest, "ask": self._ask, "ahead": bool(self._held)}

    @property
    def in_hand(self) -> int | None:
        """The batch that the process computes now, or next."""
        return self._held[0].batch if self._held else None

    def begin_pass(self) -> None:
        """Batches of an abandoned pass that were handed out but not computed are handed out again."""
        left = [lent for lent in self._held if not lent.is_echo]
        if self._has_ended and self._held and not left:
            self.epoch += 1  # only echoes were left
        self._ready.extendleft(reversed(left))
        self._held.clear()
        self._has_ended, self._is_empty = False, True

    def take(self) -> Lent | Now:
        """The next batch of the pass.

        A loader that asks while it holds a batch must not wait: it might wait for that batch. If there is no batch left
        to lend, its pass ends. But one process must stay in the pass for batches that may return. That process gets
        echoes of its last batch; `step()` does not use them, and the process waits there.
        """
        if self._over:
            self._has_ended = True
            return Now.END
        if self._ready:
            if self.runs_on and self._is_empty:
                self.epoch = max(self.epoch, self._ready[0].epoch)  # other processes have used up the epochs in between
            if self._ready[0].epoch > self.epoch:
                return self._end_pass()
            self._is_empty = False
            lent = self._ready.popleft()
            self._held.append(lent)
            return lent
        if self._epoch_over >= self.epoch and not self.runs_on:
            return self._end_pass()
        if self._held and self._ask > 0 and self._none_for == self._ask:
            if not self._stays:
                return self._end_pass()
            self._held.append(Lent(self._held[-1].batch, self.epoch, None, is_echo=True))
            return self._held[-1]
        return Now.WAIT

    def _end_pass(self) -> Now:
        self._has_ended = True
        self.epoch += self.pass_is_over
        return Now.END

    @property
    def pass_is_over(self) -> bool:
        """Whether all batches of the pass are handed out and computed."""
        return self._has_ended and not self._held

    @property
    def holds_echo(self) -> bool:
        """Whether the batch in hand is an echo."""
        return bool(self._held) and self._held[0].is_echo

    @property
    def waits_in_echo(self) -> bool:
        """Whether there is no batch to compute until the next message."""
        over = self._over or self._has_ended or self._epoch_over >= self.epoch or self.runs_on
        return not over and not self._ready and all(lent.is_echo for lent in self._held)

    def computed(self) -> bool:
        """The batch in hand is done, used or not. False: there was no batch."""
        if not self._held:
            return False
        self._held.popleft()
        self.epoch += self.pass_is_over
        return True
