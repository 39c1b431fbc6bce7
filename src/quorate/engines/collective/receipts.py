"""What became of one call of `optimizer.step()`."""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """Whether a gradient was used.

    version: how many updates the parameters have had when the next iteration reads them.
    staleness: how many updates they had had since the gradient was computed, when it was (or will be) applied.
    late_s: how long after its version was over a dropped gradient came.
    lost_samples: samples of a dropped batch that will not come again in this epoch (0 with `quorate.Sampler`, which
        hands them out again; None where the size of the batch is not known).
    over: no more updates will be made: the others have ended.
    """

    applied: bool
    version: int
    reason: str
    staleness: int = 0
    late_s: float = 0.0
    lost_samples: int | None = 0
    over: bool = False
