"""Batches under full and delayed sync: every worker is in every round, so the round alone assigns the batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from quorate.errors import BadInput
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
