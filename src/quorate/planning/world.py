"""The world that a plan is computed from: a table of how long each worker takes in each round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

#: What happens to a gradient that misses its round.
CANCEL, FINISH = "cancel", "finish"


@dataclass(frozen=True, kw_only=True)
class World:
    """Rounds by workers: the joint times as they were measured or drawn, never combined from marginals.

    A row holds the seconds that each worker needed for its batch in that round, or an estimate where the batch was
    cancelled. One row therefore shows which workers were slow together. Rows are in time order, so slow spells stay
    contiguous.
    """

    source: str  # the origin of the times, for sentences: "trace run/trace.jsonl"
    seconds: Floats  # (rounds, workers)
    span_s: Floats  # (rounds,): from the start of a recorded round to the start of the next
    regimes: tuple[slice, ...]  # stretches of similar rounds; a slow spell is a stretch of its own
    workers: tuple[int, ...]  # worker number of each column
    unseen: frozenset[int] = frozenset()  # workers that hardly ever finished; their times are lower bounds
    overhead_s: float = 0.0  # of an update, on top of waiting for arrivals
    transfer_s: Floats | None = None  # (rounds, workers): the part of `seconds` spent on communication
    batch_size: int | None = None
    batches_per_epoch: int | None = None
    model_bytes: int | None = None
    noise_scale: float | None = None  # in samples
    slowest_part: dict[int, str] | None = None  # worker -> data, compute or transfer; None if not measured
    kept_quorum: int | None = None  # the recorded quorum, if workers shared cores: no other split can be judged
    least_all_s: float | None = None  # lower bound on waiting for all workers, if that time is partly estimated
    cautions: tuple[str, ...] = ()  # warnings to read before any figure
    notes: tuple[str, ...] = ()

    @property
    def known(self) -> int:
        """Number of workers whose times were seen: the largest quorum that can be predicted."""
        return self.machines - len(self.unseen.intersection(self.workers))

    @property
    def rounds(self) -> int:
        return int(self.seconds.shape[0])

    @property
    def machines(self) -> int:
        return int(self.seconds.shape[1])

    def with_columns(self, columns: list[int]) -> World:
        return replace(
            self,
            seconds=self.seconds[:, columns],
            transfer_s=None if self.transfer_s is None else self.transfer_s[:, columns],
            workers=tuple(self.workers[column] for column in columns),
        )

    def noted(self, *sentences: str) -> World:
        return replace(self, notes=(*self.notes, *sentences))
