"""Who has which batch where every process is in every round: it follows from the round, so nobody need be asked."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from quorate.errors import BadInput
from quorate.ledger import Ledger, Loan


class Seating:
    """In round r of an epoch, worker w has batch r·workers + w of that epoch."""

    def __init__(self, batches: int, workers: int) -> None:
        if batches < workers:
            raise BadInput(
                f"an epoch has {batches} batches, but there are {workers} workers, and each needs at least one; "
                f"choose a smaller batch_size"
            )
        self.batches, self.workers = batches, workers
        self.rounds = math.ceil(batches / workers)  # in an epoch

    def batch(self, round: int, worker: int) -> int | None:
        """The batch of a worker in a round, both counted over all epochs; None: it sits that round out."""
        epoch, place = divmod(round, self.rounds)
        number = place * self.workers + worker
        return epoch * self.batches + number if number < self.batches else None

    def count(self, worker: int) -> int:
        """How many batches of an epoch a worker has."""
        return len(range(worker, self.batches, self.workers))


class SeatedLedger(Ledger):
    """The coordinator's side: lends each worker the batch that it has in a round anyway; nothing ever comes back."""

    def __init__(self, samples: int, batch_size: int, workers: int, seed: int = 0, first_round: int = 0) -> None:
        super().__init__(samples, batch_size, None, seed)
        self._first_round = first_round  # of all epochs; the coordinator counts from there
        assert self.batches_per_epoch is not None
        self._seating = Seating(self.batches_per_epoch, workers)

    def borrow(self, round: int | None, worker: int | None = None) -> Loan | None:
        assert round is not None and worker is not None
        batch = self._seating.batch(self._first_round + round, worker)
        if batch is None:
            return None
        self._out += 1
        return Loan(batch, self.size(batch), False)


class Seat:
    """A process's side: the batches of one worker, and how far it is."""

    def __init__(self, seating: Seating, worker: int, round: int = 0, first_epoch: int = 0) -> None:
        self.seating, self._worker = seating, worker
        self.first_epoch = first_epoch  # what the epoch of round 0 is called
        self.round = round  # the next that this worker is in, over all epochs
        self._handed: deque[int] = deque()  # handed out, and not computed yet
        self._computed = 0  # batches, in this pass
        self._pass_is_whole = False
        self._sit_out()

    @property
    def epoch(self) -> int:
        return self.first_epoch + self.round // self.seating.rounds

    @property
    def has_begun(self) -> bool:
        return self.round > 0 or bool(self._handed)

    @property
    def in_hand(self) -> int | None:
        """The batch that is computed now, or next."""
        return self._handed[0] if self._handed else None

    def batch_of(self, number: int) -> int:
        """The batch of this worker that has this number, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.seating.count(self._worker))
        batch = self.seating.batch(epoch * self.seating.rounds + place, self._worker)
        assert batch is not None
        return batch

    def sits_out(self, round: int) -> bool:
        return self.seating.batch(round, self._worker) is None

    def rest_of_epoch(self) -> Iterator[int]:
        """The batches of a pass, from where training is."""
        if self._pass_is_whole and self._handed and self._computed:
            raise BadInput(
                f"the last pass had {len(self._handed) + self._computed} batches, but optimizer.step() was called only "
                f"{self._computed} times; if several batches make a step, say how many: Sampler(…, accumulate=…)"
            )
        self._handed.clear()
        self._computed, self._pass_is_whole = 0, False
        end = (self.round // self.seating.rounds + 1) * self.seating.rounds
        return self._hand_out(range(self.round, end))

    def _hand_out(self, rounds: range) -> Iterator[int]:
        for round in rounds:
            batch = self.seating.batch(round, self._worker)
            if batch is not None:
                batch += self.first_epoch * self.seating.batches
                self._handed.append(batch)
                yield batch
        self._pass_is_whole = True

    def computed(self) -> bool:
        """The batch in hand is over. False: there was none."""
        if not self._handed:
            return False
        self._handed.popleft()
        self._computed += 1
        self.round += 1
        self._sit_out()
        return True

    def _sit_out(self) -> None:
        while self.sits_out(self.round):
            self.round += 1
