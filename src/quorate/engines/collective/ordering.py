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
    backward's order. The choice for the n-th piece uses what the (n − IN_FLIGHT)-th said, which is old; so a bucket
    also counts as computed from the piece on at which it was, in the round before.

    before: by bucket, that piece of the round before (`ready_at` of its order).
    """

    def __init__(
        self, buckets: Sequence[Bucket], urgency: Sequence[int], before: Sequence[int | None] | None = None
    ) -> None:
        self._before = before or [None] * len(buckets)
        self.ready_at: list[int | None] = [None] * len(buckets)  # by bucket, the first piece that left when all had it
        self._chosen = self._heard = 0
        self._waiting: list[list[Piece]] = [list(reversed(bucket.pieces)) for bucket in buckets]
        self._by_urgency = sorted(range(len(buckets)), key=lambda number: urgency[number])
        self._ready = [False] * len(buckets)
        self.left = sum(len(bucket.pieces) for bucket in buckets)

    def heard(self, not_ready: Sequence[float]) -> None:
        """A piece's sums are in; to be told in the order in which pieces left."""
        for number, missing in enumerate(not_ready):
            if missing == 0:
                self._ready[number] = True
                if self.ready_at[number] is None:
                    self.ready_at[number] = self._heard
        self._heard += 1

    def next(self) -> Piece:
        """The piece that goes next; only while some are left."""
        self.left -= 1
        place, self._chosen = self._chosen, self._chosen + 1
        for number in self._by_urgency:
            if self._waiting[number] and (self._ready[number] or self._was_ready(number, place)):
                return self._waiting[number].pop()
        return next(pieces for pieces in self._waiting if pieces).pop()

    def _was_ready(self, number: int, place: int) -> bool:
        before = self._before[number]
        return before is not None and before <= place
