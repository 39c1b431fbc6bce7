"""The ledger of processes that draw their batches themselves, ahead of their tickets (`quorate.Sampler`).

It is in worker 0's process, with the coordinator. Where a quorum decides, gradients are dropped, so batches are lent
one by one, and come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quorate.events import Ticket
from quorate.ledger import Ledger, Loan

#: Sends a message to a worker's process.
Tell = Callable[[int, dict[str, Any]], None]


class _Held(NamedTuple):
    """A batch that a process has."""

    batch: int
    floor: int | None  # it will not be computed on an older version than this


class _InFlight(NamedTuple):
    version: int
    batch: int


@dataclass
class _Desk:
    """What is known of one process."""

    held: deque[_Held] = field(default_factory=deque)  # lent and not over, in the order in which it computes them
    in_vain: bool = False  # it computes the first of them on a version that is over; the batch is back already
    version: int | None = None  # on which it computes the first (None: nobody knows yet)
    ticket: _InFlight | None = None
    seated: bool = False  # it has a ticket, so what it computes will be asked for
    epoch: int = 0  # of the pass that its sampler is in
    lent: int = 0  # batches, in all


class LendingLedger(Ledger):
    """Lends batches to processes that compute them strictly in the order in which they got them.

    A ticket borrows the oldest batch its worker has; a process that asks ahead has more than that one. The process says
    on which version it goes on (`began`) and when a batch is over (`done`): so it is known whether a cancelled ticket's
    batch was begun and is wasted there (it goes back to the queue) or is still to come (it stays where it is). Where
    what the process says comes too late for a ticket that was just started, the ticket has to be rebound: both
    methods then give True, and the engine gives a `Rebound` event.

    An epoch is over when every batch of it was applied (or given up after NaN or Inf). Fresh batches of the next are
    lent from then on, or before that to a process that is in the next already: one that asks ahead does not wait.
    """

    def __init__(self, samples: int, batch_size: int, workers: int, tell: Tell, *, seed: int = 0) -> None:
        super().__init__(samples, batch_size, None, seed)
        self._tell, self._workers = tell, workers
        self._desks = [_Desk() for _ in range(workers)]
        self._holder: dict[int, int] = {}  # batch -> the worker that has yet to compute it, or does so to some use
        self._on: dict[int, int] = {}  # batch -> tickets that have it
        self._borrower: dict[int, int] = {}  # batch -> whose tickets these are
        assert self.batches_per_epoch is not None
        self._per_epoch: int = self.batches_per_epoch
        self.epoch = 0  # the oldest that is not over
        self._used: dict[int, int] = {}  # epoch that is not over -> how many batches of it were applied or given up

    # ------------------------------------------------------------ what the coordinator asks

    def borrow(self, round: int | None, worker: int | None = None) -> Loan | None:
        """The oldest batch that the worker has and will compute on this version; else one more is lent to it."""
        assert round is not None and worker is not None
        desk = self._desks[worker]
        if desk.held and not desk.in_vain and desk.version is not None and desk.version < round:
            self._is_in_vain(desk)
        place = 1 if desk.in_vain else 0
        if len(desk.held) > place:
            batch = desk.held[place].batch
        else:
            taken = self._take(desk)
            if taken is None:
                desk.seated = False
                return None
            batch = taken
            if not desk.held:
                desk.version = None  # it holds nothing, so it goes on from the version that the loan names
            self._lend(worker, batch, None if desk.held else round)
        desk.ticket, desk.seated = _InFlight(round, batch), True
        self._on[batch] = self._on.get(batch, 0) + 1
        self._borrower[batch] = worker
        return Loan(batch, self.size(batch), self._is_pinned(batch))

    def spend(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            del self._on[ticket.batch], self._borrower[ticket.batch]
        super().spend(tickets)
        self._use(ticket.batch for ticket in tickets)

    def give_back(self, batch: int) -> None:
        """Its ticket was cancelled or dropped: the batch is free, unless its process has yet to begin it."""
        worker = self._end_ticket(batch)
        if batch in self._on:
            return  # a newer ticket of the same worker has it
        desk = self._desks[worker]
        if self._holder.get(batch) != worker:
            super().give_back(batch)
        elif desk.held[0].batch == batch and desk.version is not None and not desk.in_vain:
            self._is_in_vain(desk)

    def lose(self, batch: int) -> None:
        worker = self._end_ticket(batch)
        still_held = self._holder.get(batch) == worker
        self.left(worker)
        if not still_held and batch not in self._on:
            super().lose(batch)

    def refuse(self, batch: int) -> bool:
        self._end_ticket(batch)
        again = super().refuse(batch)
        if not again:
            self._use([batch])
        return again

    def _end_ticket(self, batch: int) -> int:
        """One ticket less on this batch; gives the worker whose it was."""
        worker = self._borrower[batch]
        self._on[batch] -= 1
        if not self._on[batch]:
            del self._on[batch], self._borrower[batch]
            desk = self._desks[worker]
            if desk.ticket is not None and desk.ticket.batch == batch:
                desk.ticket = None
        return worker

    # ------------------------------------------------------------ what the processes say

    def wanted(self, worker: int, total: int, epoch: int, ask: int) -> None:
        """Its sampler wants so many batches in all; it is told if there is none to lend, with its question's number."""
        desk = self._desks[worker]
        desk.epoch = epoch
        # Only to a worker with a ticket: another would compute its batch at once, and nobody would ask for it.
        while desk.seated and desk.lent < total and (batch := self._take(desk)) is not None:
            self._lend(worker, batch, None)
        if desk.lent < total:  # it asks again, or waits, and has one with its next ticket
            self._tell(worker, {"kind": "none", "ask": ask})

    def began(self, worker: int, version: int) -> bool:
        """It goes on from this version: its oldest batch is computed on it. True: its ticket must be rebound."""
        desk = self._desks[worker]
        if desk.held and desk.held[0].floor is not None and version < desk.held[0].floor:
            return False  # said before it got that batch; it will say more
        desk.version = version
        ticket = desk.ticket
        if not desk.held or desk.in_vain or ticket is None or ticket.batch != desk.held[0].batch:
            return False
        if version >= ticket.version:
            return False
        self._is_in_vain(desk)
        return True

    def done(self, worker: int, version: int) -> bool:
        """It brought, or gave up, its oldest batch, computed on this version. True: its ticket must be rebound.

        To be called before the event that follows from it is given to the coordinator.
        """
        desk = self._desks[worker]
        if not desk.held:
            return False
        batch, _ = desk.held.popleft()
        in_vain, desk.in_vain, desk.version = desk.in_vain, False, None
        if in_vain:
            return False
        del self._holder[batch]
        if desk.ticket is not None and desk.ticket.batch == batch:
            if version < desk.ticket.version:
                return True
            desk.ticket = None
        elif batch not in self._on:
            super().give_back(batch)
        return False

    def left(self, worker: int) -> None:
        """It will bring nothing more: what it has is free. To be called before the coordinator hears of its loss."""
        desk = self._desks[worker]
        self._desks[worker] = _Desk()
        for batch in [held.batch for held in desk.held][1 if desk.in_vain else 0 :]:
            del self._holder[batch]
            if batch not in self._on:
                super().lose(batch)

    # ------------------------------------------------------------ lending

    def _lend(self, worker: int, batch: int, floor: int | None) -> None:
        desk = self._desks[worker]
        desk.held.append(_Held(batch, floor))
        desk.lent += 1
        self._holder[batch] = worker
        self._tell(worker, {"kind": "lent", "batch": batch, "epoch": batch // self._per_epoch, "version": floor})

    def _take(self, desk: _Desk) -> int | None:
        """The next batch that is free: one that came back, a fresh one, one that was refused."""
        has_fresh = self._next < (max(desk.epoch, self.epoch) + 1) * self._per_epoch
        if self._returned:
            batch = self._returned.popleft()
            own = desk.held[0].batch if desk.in_vain else None
            if batch == own and (self._returned or has_fresh):
                # Somebody quicker shall have what it was too slow for.
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

    def _is_in_vain(self, desk: _Desk) -> None:
        """Its process computes this desk's first batch on a version that is over."""
        desk.in_vain = True
        batch = desk.held[0].batch
        del self._holder[batch]
        if batch not in self._on:
            super().give_back(batch)

    def _use(self, batches: Iterable[int]) -> None:
        """These are applied or given up; whoever waits is told which epoch that ends."""
        for batch in batches:
            epoch = batch // self._per_epoch
            self._used[epoch] = self._used.get(epoch, 0) + 1
        while self._used.get(self.epoch) == self._per_epoch:
            del self._used[self.epoch]
            for worker in range(self._workers):
                self._tell(worker, {"kind": "epoch_over", "epoch": self.epoch})
            self.epoch += 1

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """What was used, as JSON values. What is lent counts as returned: after a restart nothing is on loan."""
        return {
            **super().state(),
            "epoch": self.epoch,
            "used": [list(pair) for pair in self._used.items()],
            "returned": sorted(self._lent()) + list(self._returned),
            "out": 0,
        }

    def _lent(self) -> Iterable[int]:
        return self._holder.keys() | self._on.keys()

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.epoch, self._used = state["epoch"], dict(state["used"])
        self._desks = [_Desk() for _ in range(self._workers)]
        self._holder, self._on, self._borrower = {}, {}, {}
