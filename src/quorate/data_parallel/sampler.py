"""A batch sampler for a DataLoader that hands out the ledger's batches: each sample is used exactly once per epoch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sized
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakSet

from torch.utils.data import Sampler as TorchSampler
from torch.utils.data import SequentialSampler

from quorate.data_parallel.batches import (
    LAST,
    BatchAssignment,
    BatchBorrower,
    FixedBatches,
    FixedLedger,
    LendingLedger,
    Lent,
    Now,
    Tell,
)
from quorate.data_parallel.process_group import world_size
from quorate.errors import BadInput, QuorateError, check_at_least
from quorate.ledger import Ledger

#: Sends a message (its kind, and its fields by name) to the coordinator without waiting.
Send = Callable[..., None]
#: Moves this process to the newest version, which is at least this one; returns the newest version.
CatchUp = Callable[[int], int]
#: Called at the end of a pass: all processes reach the same version. Returns that version.
AtEnd = Callable[[], int]


class Sampler(TorchSampler[list[int]]):
    """Chooses the samples that this process computes next: `DataLoader(data, batch_sampler=sampler)`.

    data: the data set, or its number of samples.
    batch_size: samples in a batch of one process.
    accumulate: batches whose gradients are added up for one `optimizer.step()`; they are used, or dropped, together.
    seed: of the sample order. The order differs in every epoch and does not depend on the number of processes.

    A sampler belongs to one model: `DataParallel(…, sampler=sampler)`. A pass covers the rest of the current epoch: it
    is shorter after a pass that the script left early, and in a resumed run.

    If the policy drops a gradient, its batch comes back, and the next free process gets it. A pass ends in all
    processes together, when every batch of the epoch was applied; then all have the same newest version. A DataLoader
    with its own processes (`num_workers`) asks ahead, and cannot wait for batches that its own model may still drop. So
    at the end of a pass one process stays for the batches that others drop. Meanwhile it gets some batches a second
    time, which are not used (`Receipt.applied` is False).
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
        self._batches = Ledger(samples, per_step, seed=seed)  # only for the samples of a batch; it lends nothing
        assert self._batches.batches_per_epoch is not None
        self._per_epoch = self._batches.batches_per_epoch
        if 0 < samples % per_step < accumulate:
            raise BadInput(
                f"the last step of an epoch would have {samples % per_step} samples for {accumulate} batches; "
                f"choose another batch_size"
            )
        self._changed = threading.Condition()
        self._source: FixedBatches | BatchBorrower | None = None  # None until `bind`
        self._share = 0  # this process's number of batches in an epoch
        self._first_epoch = 0
        self._has_begun = False  # the first pass
        self._data = None if isinstance(data, int) else data
        _samplers.add(self)
        #: Under a quorum: one pass covers all epochs, so there is no end of a pass at which processes meet.
        self.endless = False
        self.handing_out: Callable[[], None] | None = None  # called before each batch
        self._restored: dict[str, Any] = {}
        # Only if batches are lent:
        self._send: Send | None = None
        self._catch_up: CatchUp | None = None
        self._at_end: AtEnd | None = None
        self._at_begin: Callable[[], None] | None = None
        self._version = 0
        self.waits_since: float | None = None  # since when the script's thread waits for a batch
        self._error: QuorateError | None = None
        self._early: list[dict[str, Any]] = []  # messages before `bind`, if other processes are bound already

    # ------------------------------------------------------------ for DataParallel

    def bind(
        self,
        worker: int,
        workers: int,
        decided: bool,
        send: Send | None = None,
        catch_up: CatchUp | None = None,
        at_end: AtEnd | None = None,
        at_begin: Callable[[], None] | None = None,
    ) -> None:
        """Bind the sampler to a model, for this worker of this number of workers.

        decided: the coordinator chooses each quorum, so batches are lent and may come back.
        send: sends a message to the coordinator.
        catch_up: called between two batches if the next batch is for a newer version than this process has. It moves
            the process to the newest version and reports that (`began`).
        at_begin, at_end: called at the beginning and at the end of a pass.
        """
        if self._source is not None:
            raise BadInput("this sampler belongs to a model already; make another one for another model")
        self._at_end, self._at_begin = at_end, at_begin
        assignment = self._assignment(workers)  # also refuses too few batches
        if decided:
            assert send is not None
            self._send, self._catch_up = send, catch_up
            self._share = math.ceil(assignment.batches / workers)
            with self._changed:
                self._source = borrower = BatchBorrower(LAST if self.endless else self._restored.get("epoch", 0))
                for message in self._early:
                    borrower.heard(message)
            return
        self._source = FixedBatches(assignment, worker)
        self._share = assignment.count(worker)

    def ledger(self, workers: int, decided: bool, tell: Tell) -> LendingLedger | FixedLedger:
        """The coordinator's ledger, for worker 0's process."""
        samples, per_step, seed = self._batches.samples, self._batches.batch_size, self._batches.seed
        assert samples is not None
        if decided:
            return LendingLedger(samples, per_step, workers, tell, seed=seed)
        return FixedLedger(samples, per_step, workers, seed, *self._place)

    @property
    def samples(self) -> int | None:
        return self._batches.samples

    @property
    def per_step(self) -> int:
        """Samples in a step of one process; the last step of an epoch may have fewer."""
        return self._batches.batch_size

    def is_uneven(self, workers: int) -> bool:
        """Whether some of this number of processes have no batch in the last round of an epoch."""
        return self._assignment(workers).is_uneven()

    def _assignment(self, workers: int) -> BatchAssignment:
        return BatchAssignment(self._per_epoch, workers, *self._place)

    @property
    def _place(self) -> tuple[int, int]:
        """The epoch in which this run or resumed run starts, and the number of its batches that were used before."""
        return self._first_epoch, self._restored.get("used", 0)

    def heard(self, message: dict[str, Any]) -> None:
        """Handle a control message; messages for other receivers are ignored. From any thread."""
        with self._changed:
            if self._source is None:
                self._early.append(message)
            elif isinstance(self._source, BatchBorrower):
                self._source.heard(message)
                self._changed.notify_all()

    def failed(self, error: QuorateError) -> None:
        """The run has failed: a thread that waits for a batch raises this error. From any thread."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def let_go(self) -> None:
        """The model has ended: drop the references to it."""
        self._catch_up = self._at_end = self._at_begin = self.handing_out = None

    def stepped(self, version: int) -> None:
        """`optimizer.step()` is over, its gradient used or not; the next gradient is computed on this version."""
        with self._changed:
            self._version = version
            source = self._bound()
            known = source.computed()
        if not known:
            raise self._no_batch()
        self._end_pass_of(source)

    def _end_pass_of(self, source: FixedBatches | BatchBorrower) -> None:
        """If the pass is over and all its batches are computed, the processes meet."""
        if source.pass_is_over and self._at_end is not None and not source.runs_on:
            self._version = self._at_end()

    def run_on(self, on: bool) -> None:
        """Let passes end without a meeting, for a loop that counts updates and has its own meetings."""
        with self._changed:
            if isinstance(self._source, BatchBorrower):
                self._ask(self._source.run_on(on))

    @property
    def holds_echo(self) -> bool:
        """Whether the batch in hand is an echo, which `step()` must not use."""
        with self._changed:
            return isinstance(self._source, BatchBorrower) and self._source.holds_echo

    def wait_in_echo(self) -> None:
        """Wait until there is a batch to compute, or the pass is over."""
        borrower = self._bound()
        assert isinstance(borrower, BatchBorrower)
        with self._changed:
            self.waits_since = monotonic()
            self._changed.wait_for(lambda: self._error is not None or not borrower.waits_in_echo)
            self.waits_since = None
            if self._error is not None:
                raise self._error

    def sits_out(self, round: int) -> bool:
        """Whether this process has no batch in a round, counted over all epochs."""
        source = self._bound()
        return isinstance(source, FixedBatches) and source.sits_out(round)

    @property
    def between_epochs(self) -> bool:
        """Whether the next batch is known to be the first of an epoch."""
        return isinstance(self._source, FixedBatches) and self._source.assignment.place(self._source.round)[1] == 0

    @property
    def samples_in_hand(self) -> int:
        """The number of samples of the next step."""
        with self._changed:
            batch = self._bound().in_hand
        if batch is None:
            raise self._no_batch()
        return self._batches.size(batch)

    def _bound(self) -> FixedBatches | BatchBorrower:
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

    # ------------------------------------------------------------ for a DataLoader

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two passes."""
        with self._changed:
            if isinstance(self._source, BatchBorrower):
                return self._first_epoch + self._source.epoch
            return self._first_epoch if self._source is None else self._source.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the first epoch, as scripts with a DistributedSampler do; later epochs are counted, and calls ignored.

        `loader.sampler.set_epoch(epoch)` calls this method, too.
        """
        check_at_least("epoch", epoch, 0)
        if self._has_begun or self._restored:
            return
        self._first_epoch = epoch
        if isinstance(self._source, FixedBatches):
            self._source.assignment.epoch = epoch

    def __len__(self) -> int:
        """Batches of this process in an epoch; an even share under a quorum and before the sampler is bound."""
        share = math.ceil(self._per_epoch / world_size()) if self._source is None else self._share
        return share * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        source = self._bound()
        self._has_begun = True
        if self._at_begin is not None:
            self._at_begin()
        if isinstance(source, FixedBatches):
            return self._pass(source, source.rest_of_epoch())
        with self._changed:
            source.begin_pass()
        return self._pass(source, iter(partial(self._next_lent, source), None))

    def _pass(self, source: FixedBatches | BatchBorrower, batches: Iterator[int]) -> Iterator[list[int]]:
        for batch in batches:
            yield from self._pieces(batch)
        self._end_pass_of(source)

    def _next_lent(self, borrower: BatchBorrower) -> int | None:
        """The next batch, after a wait if the loader may wait; None when the pass is over."""
        with self._changed:
            asked_ahead = borrower.in_hand is not None
            self._ask(borrower.question())
            while (taken := borrower.take()) is Now.WAIT:
                if self._error is not None:
                    raise self._error
                self.waits_since = self.waits_since or monotonic()
                self._changed.wait()
            self.waits_since = None
            if not isinstance(taken, Lent):
                return None
            if asked_ahead:  # the loader will ask ahead again, and should find a batch ready
                self._ask(borrower.question())
        needed = taken.version
        if not asked_ahead and needed is not None and needed > self._version and self._catch_up is not None:
            self._version = self._catch_up(needed)
        return taken.batch

    def _ask(self, question: dict[str, Any] | None) -> None:
        if question is not None:
            assert self._send is not None
            self._send("want", **question)

    def _pieces(self, batch: int) -> Iterator[list[int]]:
        """Split a batch of the ledger into the `accumulate` batches of one step; a short batch is split evenly."""
        if self.handing_out is not None:
            self.handing_out()
        if isinstance(self._source, BatchBorrower):  # the ledger counts epochs from 0
            batch += self._first_epoch * self._per_epoch
        samples = self._batches.indices(batch)
        for piece in range(self.accumulate):
            first, last = (len(samples) * one // self.accumulate for one in (piece, piece + 1))
            yield samples[first:last]

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The position of this process, as JSON values, after a step. (The ledger's state has the loans.)"""
        data, source = self._data_facts(), self._bound()
        if isinstance(source, BatchBorrower):
            return {**data, "epoch": source.epoch, "first_epoch": self._first_epoch}
        epoch, used = source.assignment.place(source.round)
        return {**data, "first_epoch": epoch, "used": used}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a result of `state`; to be called before `bind`."""
        assert self._source is None
        for key, here in self._data_facts().items():
            if state[key] != here:
                raise BadInput(f"the checkpoint's sampler has {key} {state[key]}, this one {here}; make it as it was")
        self._restored, self._first_epoch = dict(state), state.get("first_epoch", 0)

    def _data_facts(self) -> dict[str, int | None]:
        """Data sizes and seed, which a resumed run must share with the interrupted one."""
        return {"samples": self.samples, "batch_size": self.per_step, "seed": self._batches.seed}


_samplers: WeakSet[Sampler] = WeakSet()


def _set_epoch(self: SequentialSampler, epoch: int) -> None:
    """`loader.sampler.set_epoch(epoch)`, which scripts call.

    A DataLoader with a batch sampler creates a SequentialSampler of its data as `loader.sampler`.
    """
    for sampler in list(_samplers):
        if sampler._data is self.data_source or (sampler._data is None and sampler.samples == len(self.data_source)):
            sampler.set_epoch(epoch)


SequentialSampler.set_epoch = _set_epoch  # type: ignore[attr-defined]


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
