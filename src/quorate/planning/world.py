"""What is known of a cluster: how long each worker takes in each round, as a table that plans are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

#: What happens to work that comes too late.
CANCEL, FINISH = "cancel", "finish"


@dataclass(frozen=True, kw_only=True)
class World:
    """Rounds by workers: the joint times as they were measured or drawn, never marginals put together.

    A round's row holds what each worker needed (or, by the best guess, would have needed) for its batch, so one row
    shows who was slow together with whom. Rows are in the order of time, so that slow spells stay spells.
    """

    source: str  # where it is from, as a sentence says it: "trace run/trace.jsonl"
    seconds: Floats  # (rounds, workers)
    span_s: Floats  # (rounds,): from the opening of a recorded round to that of the next
    regimes: tuple[slice, ...]  # stretches of rounds that are alike; slow spells are stretches of their own
    workers: tuple[int, ...]  # the numbers of the workers, by column
    unseen: frozenset[int] = frozenset()  # workers that hardly ever finished: their times are lower bounds
    overhead_s: float = 0.0  # of an update, besides waiting for arrivals
    transfer_s: Floats | None = None  # (rounds, workers): what of the seconds was communication
    batch_size: int | None = None
    batches_per_epoch: int | None = None
    model_bytes: int | None = None
    noise_scale: float | None = None  # in samples
    slowest_part: dict[int, str] | None = None  # worker -> data, compute or transfer, where parts were measured
    notes: tuple[str, ...] = ()  # what a reader should know of it

    @property
    def known(self) -> int:
        """How many arrivals of a round can be waited for and foretold."""
        return self.machines - len(self.unseen.intersection(self.workers))

    @property
    def rounds(self) -> int:
        return int(self.seconds.shape[0])

    @property
    def machines(self) -> int:
        return int(self.seconds.shape[1])

    def with_columns(self, columns: list[int]) -> World:
        """The same rounds with some of the workers."""
        return replace(
            self,
            seconds=self.seconds[:, columns],
            transfer_s=None if self.transfer_s is None else self.transfer_s[:, columns],
            workers=tuple(self.workers[column] for column in columns),
        )

    def noted(self, *sentences: str) -> World:
        return replace(self, notes=(*self.notes, *sentences))
