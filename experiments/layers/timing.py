"""When in a step a worker reads a layer's parameters, and when its gradient of that layer is applied.

Shares of a step, from 0 to 1. Forward goes through the layers from the bottom to the top, backward back down; with
nothing else to wait for,

    layer l is needed at     f · (time of the layers below l)
    its gradient is there at 1 − (1 − f) · (time of the layers below l)

f being the share of forward. So the bottom layer is read first and written last, and a layer's gradient is stale by
what others write between the two: with n workers that are alike, (n − 1) times that share of a step, on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quorate.errors import BadInput

#: Backward takes about twice as long as forward: it computes gradients of activations and of parameters.
FORWARD = 1 / 3

READS = ("late", "early")
WRITES = ("at once", "at the end")


class Timing(NamedTuple):
    """By layer, bottom first: when it is read and when its gradient is applied, as shares of a step."""

    read: tuple[float, ...]
    write: tuple[float, ...]

    def windows(self) -> tuple[float, ...]:
        """The share of a step between the two."""
        return tuple(write - read for read, write in zip(self.read, self.write, strict=True))


def timing_of(
    shares: Sequence[float],
    *,
    read: str = "late",
    write: str = "at once",
    forward: float = FORWARD,
    transit: float = 0.0,
) -> Timing:
    """The timing of a net whose layers take these shares of the arithmetic (they need not add up to 1).

    read: "late", just before a layer is needed; "early", all at the start of the step.
    write: "at once" when a layer's gradient is there; "at the end", all together.
    transit: the share of a step that parameters are on their way to a worker, and gradients on theirs from it; what
        others write meanwhile is missed.
    """
    if read not in READS or write not in WRITES:
        raise BadInput(f"read {read!r}, write {write!r}: give one of {READS} and one of {WRITES}")
    if not (0 <= transit < 0.5 and 0 < forward < 1):
        raise BadInput(f"transit {transit:g} and forward {forward:g} leave no time to compute; transit is below 0.5")
    compute = 1 - 2 * transit
    below, total = 0.0, sum(shares)
    reads, writes = [], []
    for share in shares:
        reads.append(compute * forward * below if read == "late" else 0.0)
        writes.append(1 - compute * (1 - forward) * below if write == "at once" else 1.0)
        below += share / total
    return Timing(tuple(reads), tuple(writes))
