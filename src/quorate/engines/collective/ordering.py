"""Which piece travels next: agreed by all workers without a message, because all compute it from the same sums."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.engines.collective.layout import Bucket, Piece

#: All-reduces under way at once: while one ends and the next is chosen, the network has another to carry.
IN_FLIGHT = 2


class Order:
    """The order of one round's pieces.

    A piece's header says which buckets some worker was not ready with when it left. Once its sums are known, everybody
    knows the same: of the buckets that all have computed, the most urgent goes next; if there is none, the next in
    backward's order. The choice for the n-th piece uses what the (n − IN_FLIGHT)-th said.
    """

    def __init__(self, buckets: Sequence[Bucket], urgency: Sequence[int]) -> None:
        self._waiting: list[list[Piece]] = [list(reversed(bucket.pieces)) for bucket in buckets]
        self._by_urgency = sorted(range(len(buckets)), key=lambda number: urgency[number])
        self._ready = [False] * len(buckets)
        self.left = sum(len(bucket.pieces) for bucket in buckets)

    def heard(self, not_ready: Sequence[float]) -> None:
        """A piece's sums are in."""
        for number, missing in enumerate(not_ready):
            if missing == 0:
                self._ready[number] = True

    def next(self) -> Piece:
        """The piece that goes next; only while some are left."""
        self.left -= 1
        for number in self._by_urgency:
            if self._ready[number] and self._waiting[number]:
                return self._waiting[number].pop()
        return next(pieces for pieces in self._waiting if pieces).pop()
