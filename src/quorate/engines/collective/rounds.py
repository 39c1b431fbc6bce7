"""One round of gradients in one process: from the first that is computed to the update that is applied."""

from __future__ import annotations

from threading import Lock
from typing import Any

from torch import Tensor

from quorate.engines.collective.layout import Layout, Piece
from quorate.engines.collective.marks import Mark, mark, wait_for
from quorate.engines.collective.partial_steps import Hyper
from quorate.engines.collective.slots import Slot


class Round:
    """What this process knows of a round. Its lists go by bucket.

    weight: what this process's gradient counts; 0: it takes part without one.
    expected: what all gradients are expected to count together: they travel divided by it, so that the sums need not be
        divided where all came as expected.
    """

    def __init__(
        self, number: int, slot: Slot, layout: Layout, worker: int, weight: float, expected: float = 1.0
    ) -> None:
        self.number, self.slot, self.weight, self._expected = number, slot, weight, expected
        self._layout, self._worker = layout, worker
        count = len(layout.buckets)
        self.ready = [False] * count
        self.averaged = [False] * count
        self.applied = [False] * count
        self.hyper: Hyper | None = None  # as they were at step(); None: whoever contributed says
        self.released = False  # the update may be applied
        self.release_mark: Mark = None
        self.is_void = False  # whoever contributed gave it up: there is no update
        self.stamp = 0  # stands for the hyperparameters of this process's step before
        self.weights: list[float] = []  # by worker, once the first piece is back
        self.stamps: list[float] = []  # likewise
        self.sent: dict[int, Tensor] = {}  # what was sent of buffers that go on meanwhile
        self._filled: set[int] = set()
        self._missing = [len(bucket.members) for bucket in layout.buckets]
        self._used: dict[int, bool] = {}
        self._pieces_back = [0] * count
        self._ready_marks: list[Mark] = [None] * count
        self._back_marks: list[Mark] = [None] * count
        self._averages: dict[int, dict[int, Tensor]] = {}
        self._averaging = Lock()

    # ------------------------------------------------------------ gradients in

    def fill(self, member: int, gradient: Tensor | None) -> bool:
        """Put in a gradient, or that there is none; gives whether its bucket is complete now."""
        if member in self._filled:
            return False
        self._filled.add(member)
        if gradient is None:
            self.slot.clear(member)
        else:
            self.slot.fill(member, gradient, self.weight / self._expected)
            self._used[member] = True
        number = self._layout.bucket_of[member]
        self._missing[number] -= 1
        if self._missing[number]:
            return False
        self._ready_marks[number] = mark(self._layout.buckets[number].device)
        self.ready[number] = True
        return True

    def unfilled(self) -> list[int]:
        return [member for bucket in self._layout.buckets for member in bucket.members if member not in self._filled]

    # ------------------------------------------------------------ out and back

    def leave(self, piece: Piece, ready: list[bool] | None = None) -> Tensor:
        """What to add up over all workers; `ready`: by bucket, what to tell them of it (default: as it is)."""
        wait_for(self._ready_marks[piece.bucket])
        bucket, layout = self._layout.buckets[piece.bucket], self._layout
        used = [member in self._used for member in bucket.members]
        numbers = layout.header.numbers(self._worker, self.weight, self.stamp, ready or self.ready, used)
        header = self.slot.header(piece)
        header.copy_(header.new_tensor(numbers))
        return self.slot.travelling(piece)

    def back(self, piece: Piece) -> tuple[list[float], bool]:
        """A piece's sums are there; gives by bucket how many were not ready, and whether its bucket is complete."""
        header, layout = self.slot.header(piece), self._layout
        sums = layout.header.sums(header.tolist())  # on a GPU this waits for them
        if not self.weights:
            self.weights, self.stamps = sums.weights, sums.stamps
        bucket = layout.buckets[piece.bucket]
        for member, count in zip(bucket.members, sums.used, strict=True):
            if count > 0:
                self._used[member] = True
        self._pieces_back[piece.bucket] += 1
        complete = self._pieces_back[piece.bucket] == len(bucket.pieces)
        if complete:
            self._back_marks[piece.bucket] = mark(bucket.device)
        return sums.not_ready, complete

    @property
    def total(self) -> float:
        """What all gradients weigh together; 0: nobody contributed."""
        return sum(self.weights)

    def contributors(self) -> list[int]:
        return [worker for worker, weight in enumerate(self.weights) if weight > 0]

    # ------------------------------------------------------------ averages out

    def averages(self, number: int, into: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """The averages of a bucket by member, made when first asked for; only of members that anybody used."""
        with self._averaging:
            wait_for(self._back_marks[number])
            known = self._averages.get(number)
            if known is None:
                known = self.slot.average(self._layout.buckets[number], self._expected / self.total, into)
                known = self._averages[number] = {
                    member: average for member, average in known.items() if self._used.get(member)
                }
            return known


def describe(value: Any) -> Any:
    """A hyperparameter as JSON can carry it."""
    return value.item() if hasattr(value, "item") else value  # a tensor, or a number of numpy's
