"""A batch sampler for a DataLoader that hands out the ledger's batches: each sample counts exactly once per epoch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from torch.utils.data import Sampler as TorchSampler

from quorate.errors import BadInput, QuorateError, check_at_least
from quorate.ledger import Ledger
from quorate.parallel.borrowing import Borrowing, Lent, Now
from quorate.parallel.lending import LendingLedger, Tell
from quorate.parallel.seating import Seat, SeatedLedger, Seating


class Send(Protocol):
    """Sends a message to the coordinator without waiting."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


#: Goes on from the newest version, which is at least this one; gives that version.
CatchUp = Callable[[int], int]


class Sampler(TorchSampler[list[int]]):
    """Says which samples this process computes next: `DataLoader(data, batch_sampler=sampler)`.

    data: the data set, or how many samples it has.
    batch_size: samples in a batch of one process.
    accumulate: batches whose gradients are added up for one `optimizer.step()`; they are used, or dropped, together.
    seed: of the order, which is another in every epoch and does not depend on the number of processes.

    It belongs to a model: `DataParallel(…, sampler=sampler)`. A pass goes on to the end of the epoch, from where
    training is: after a pass that was left early, or in a resumed run, it has what is left of the epoch.

    If the policy drops gradients, their batches come back, and whoever is free gets them; a pass ends when every batch
    of the epoch was applied. A DataLoader with processes of its own (`num_workers`) asks ahead, and must not wait for
    what its own model may still drop: there a pass ends when nothing is left to hand out, and what comes back after
    that is handed out at the start of the next pass (after the last pass, by those who are still in it).
    """

    def __init__(self, data: Sized | int, batch_size: int, *, accumulate: int = 1, seed: int = 0) -> None:
        samples = _samples_of(data)
        self.batch_size = check_at_least("batch_size", batch_size, 1)
        self.accumulate = check_at_least("accumulate", accumulate, 1)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise BadInput(f"seed is {seed!r}, but it must be a whole number")
        per_step = batch_size * accumulate
        if accumulate > 1 and per_step > samples:
            raise BadInput(
                f"batch_size {batch_size} × accumulate {accumulate} makes {per_step} samples for one step, "
                f"but the data set has only {samples}; lower either"
            )
        self._batches = Ledger(samples, per_step, seed=seed)  # for what is in a batch; it lends nothing
        if 0 < samples % per_step < accumulate:
            raise BadInput(
                f"the last step of an epoch would have {samples % per_step} samples for {accumulate} batches; "
                f"choose another batch_size"
            )
        self._changed = threading.Condition()
        self._source: Seat | Borrowing | None = None  # none before it is bound
        self._share = 0  # of the batches of an epoch, this process's
        self._first_epoch = 0
        self._restored: dict[str, Any] = {}
        # Where batches are lent:
        self._send: Send | None = None
        self._catch_up: CatchUp | None = None
        self._version = 0
        self._error: QuorateError | None = None
        self._early: list[dict[str, Any]] = []  # messages that came before it was bound: others are bound already

    # ------------------------------------------------------------ what DataParallel does

    def bind(
        self, worker: int, workers: int, decided: bool, send: Send | None = None, catch_up: CatchUp | None = None
    ) -> None:
        """Belong to this worker of so many.

        decided: somebody decides who makes the quorum, so batches are lent and may come back. `send` sends to that
        somebody. `catch_up` is called between two batches, where a batch is meant for a newer version than this process
        has; it makes the process go on from the newest, and says so (`began`).
        """
        if self._source is not None:
            raise BadInput("this sampler belongs to a model already; make another one for another model")
        assert self._batches.batches_per_epoch is not None
        seating = Seating(self._batches.batches_per_epoch, workers)  # also refuses too few batches
        if decided:
            assert send is not None
            self._send, self._catch_up = send, catch_up
            self._share = math.ceil(seating.batches / workers)
            with self._changed:
                self._source = borrowing = Borrowing(self._restored.get("epoch", 0))
                for message in self._early:
                    borrowing.heard(message)
            return
        before = self._restored.get("workers", workers)
        if before != workers:
            raise BadInput(
                f"the checkpoint was made with {before} processes, now there are {workers}, and who has which sample "
                f"depends on it; resume with {before}"
            )
        first_epoch = self._restored.get("first_epoch", self._first_epoch)
        self._source = Seat(seating, worker, self._restored.get("round", 0), first_epoch)
        self._share = seating.count(worker)

    def ledger(self, workers: int, decided: bool, tell: Tell) -> LendingLedger | SeatedLedger:
        """The coordinator's side of it, for worker 0's process."""
        samples, per_step, seed = self._batches.samples, self._batches.batch_size, self._batches.seed
        assert samples is not None
        if decided:
            return LendingLedger(samples, per_step, workers, tell, seed=seed)
        return SeatedLedger(samples, per_step, workers, seed, self.first_round)

    @property
    def per_step(self) -> int:
        """Samples in a step of one process, where it is not the last of an epoch."""
        return self._batches.batch_size

    def is_uneven(self, workers: int) -> bool:
        """Whether some of so many processes have no batch in the last round of an epoch."""
        batches = self._batches.batches_per_epoch
        return batches is not None and batches % workers != 0

    @property
    def first_round(self) -> int:
        """The round of all epochs in which this life of the script begins, where every process is in every round."""
        return int(self._restored.get("round", 0))

    def heard(self, message: dict[str, Any]) -> None:
        """A message of the coordinator came; those for somebody else are ignored. From any thread."""
        with self._changed:
            if self._source is None:
                self._early.append(message)
            elif isinstance(self._source, Borrowing):
                self._source.heard(message)
                self._changed.notify_all()

    def failed(self, error: QuorateError) -> None:
        """Nothing more will come: whoever waits for a batch gets this error. From any thread."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def stepped(self, version: int) -> None:
        """`optimizer.step()` is over, whether its gradient was used or not; the next is computed on this version."""
        with self._changed:
            self._version = version
            known = self._bound().computed()
        if not known:
            raise self._no_batch()

    def sits_out(self, round: int) -> bool:
        """Whether this process has no batch in a round, counted over all epochs."""
        source = self._bound()
        return isinstance(source, Seat) and source.sits_out(round)

    @property
    def samples_in_hand(self) -> int:
        """How many samples the step that comes next is made of."""
        with self._changed:
            batch = self._bound().in_hand
        if batch is None:
            raise self._no_batch()
        return self._batches.size(batch)

    def samples_of(self, number: int) -> int:
        """How many samples this worker's step of that number is made of, counted from 0 over all epochs."""
        seat = self._bound()
        assert isinstance(seat, Seat), "who has which batch is known in advance only where nothing is dropped"
        return self._batches.size(seat.batch_of(number))

    def _bound(self) -> Seat | Borrowing:
        if self._source is None:
            raise BadInput(
                "this sampler belongs to no model yet; give it to one first: DataParallel(…, sampler=sampler)"
            )
        return self._source

    def _no_batch(self) -> BadInput:
        return BadInput(
            "there is no new batch of the sampler to compute: take one for each optimizer.step(), "
            "or say how many batches make a step: Sampler(…, accumulate=…)"
        )

    # ------------------------------------------------------------ what a DataLoader does

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next."""
        with self._changed:
            return self._first_epoch if self._source is None else self._source.epoch

    def set_epoch(self, epoch: int) -> None:
        """What scripts with a DistributedSampler call: names the first epoch; after it they follow by themselves."""
        check_at_least("epoch", epoch, 0)
        if self._source is None:
            self._first_epoch = epoch
        elif isinstance(self._source, Seat) and not self._source.has_begun:
            self._source.first_epoch = epoch

    def __len__(self) -> int:
        """Batches of this process in an epoch; where a quorum decides, its even share of them."""
        self._bound()
        return self._share * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        source = self._bound()
        batches = source.rest_of_epoch() if isinstance(source, Seat) else self._lent(source)
        return (piece for batch in batches for piece in self._pieces(batch))

    def _lent(self, borrowing: Borrowing) -> Iterator[int]:
        with self._changed:
            borrowing.begin_pass()
        return iter(lambda: self._next_lent(borrowing), None)

    def _next_lent(self, borrowing: Borrowing) -> int | None:
        """Wait for the next batch, where that may be; None when the pass is over."""
        with self._changed:
            asked_ahead = borrowing.in_hand is not None
            self._ask(borrowing.question())
            while (taken := borrowing.take()) is Now.WAIT:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            if not isinstance(taken, Lent):
                return None
            if asked_ahead:  # it will be again, and shall not have to wait
                self._ask(borrowing.question())
        if (
            not asked_ahead
            and taken.version is not None
            and taken.version > self._version
            and self._catch_up is not None
        ):
            self._version = self._catch_up(taken.version)
        return taken.batch

    def _ask(self, question: dict[str, Any] | None) -> None:
        if question is not None:
            assert self._send is not None
            self._send("want", **question)

    def _pieces(self, batch: int) -> Iterator[list[int]]:
        """A batch of the ledger as those that one step adds up: always as many, evenly smaller where it is short."""
        samples = self._batches.indices(batch)
        for piece in range(self.accumulate):
            first, last = (len(samples) * one // self.accumulate for one in (piece, piece + 1))
            yield samples[first:last]

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Where this process is, as JSON values; to be taken after a step. (What is lent, the ledger knows.)"""
        data = {key: getattr(self._batches, key) for key in ("samples", "batch_size", "seed")}
        source = self._bound()
        if isinstance(source, Borrowing):
            return {**data, "epoch": self.epoch}
        return {**data, "workers": source.seating.workers, "round": source.round, "first_epoch": source.first_epoch}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state` gave; before the sampler is bound."""
        assert self._source is None
        for key in ("samples", "batch_size", "seed"):
            here = getattr(self._batches, key)
            if state[key] != here:
                raise BadInput(f"the checkpoint's sampler has {key} {state[key]}, this one {here}; make it as it was")
        self._restored = dict(state)


def _samples_of(data: Sized | int) -> int:
    if isinstance(data, int):
        return check_at_least("the number of samples", data, 1)
    try:
        samples = len(data)
    except (TypeError, NotImplementedError):
        raise BadInput(
            f"{type(data).__name__} has no length, so its samples cannot be counted; give a data set that has one, "
            f"or a number"
        ) from None
    return check_at_least("the number of samples", samples, 1)
