"""What a plan is computed from: how long each worker takes in each round, and how many updates the target takes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quorate.errors import BadInput
from quorate.number_format import number

Floats: TypeAlias = NDArray[np.float64]

#: What happens to a gradient that misses its round.
CANCEL, FINISH = "cancel", "finish"

_LN_MOST = 600.0  # keeps a steep extrapolation within the range of floats
_FORM = '--iterations "50:137.5,70:99.8,100:76.2" (quorum:thousands of updates)'


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


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Updates to the target as a function of the gradients in an update."""

    sentence: str  # the origin of this function
    noise_in_batches: float | None = None  # B_noise/B; None with iterations; inf: the noise-dominated limit
    points: tuple[tuple[float, float], ...] = ()  # (quorum, updates), if the user gave them

    @property
    def is_absolute(self) -> bool:
        """Whether `updates` returns counts; otherwise only ratios of its values mean something."""
        return bool(self.points)

    def beyond(self, quorum: int) -> str | None:
        """A warning if this quorum lies outside the given ones, so that its updates are extrapolated."""
        if not self.points or self.points[0][0] <= quorum <= self.points[-1][0]:
            return None
        return (
            f"updates were given for quorums of {self.points[0][0]:g} to {self.points[-1][0]:g}; those of {quorum} are "
            "an extrapolation"
        )

    def updates(self, gradients: Floats) -> Floats:
        if self.points:
            return _between(self.points, gradients)
        assert self.noise_in_batches is not None
        if math.isinf(self.noise_in_batches):
            return 1.0 / gradients
        return 1.0 + self.noise_in_batches / gradients


def effort_of_noise(noise_scale: float, batch_size: int, source: str) -> Effort:
    """Updates ≈ S_min (1 + B_noise/(N·B)) (McCandlish et al., 2018)."""
    return Effort(
        sentence=f"updates from the gradient noise scale, {number(noise_scale)} samples, "
        f"{number(noise_scale / batch_size)} batches of {batch_size} ({source})",
        noise_in_batches=noise_scale / batch_size,
    )


def effort_unknown() -> Effort:
    """No noise scale: assume the noise-dominated limit, where every gradient contributes the same."""
    return Effort(
        sentence="the noise scale is not known, so the noise-dominated limit is taken, where half the gradients need "
        "twice the updates: this is the fewest backups that can be right; give --noise-scale or --iterations for more",
        noise_in_batches=math.inf,
    )


def effort_of_iterations(text: str) -> Effort:
    """Measured updates to the target, given as `QUORUM:THOUSANDS,…`; interpolated linearly in log-log."""
    points: dict[float, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", part)
        if match is None:
            raise BadInput(f"iterations {text!r}: {part.strip()!r} is not QUORUM:THOUSANDS; write {_FORM}")
        quorum, thousands = float(match[1]), float(match[2])
        if quorum < 1 or not (0 < thousands < math.inf):
            raise BadInput(f"iterations {text!r}: {part.strip()!r} must have numbers above 0; write {_FORM}")
        if quorum in points:
            raise BadInput(f"iterations {text!r} has the quorum {match[1]} twice; give it one number of updates")
        points[quorum] = 1000.0 * thousands
    if len(points) < 2:
        raise BadInput(f"iterations {text!r} has one quorum, but a trend takes two or more; write {_FORM}")
    ordered = tuple(sorted(points.items()))
    return Effort(
        sentence=f"updates as given for quorums of {', '.join(f'{quorum:g}' for quorum, _ in ordered)}", points=ordered
    )


def _between(points: tuple[tuple[float, float], ...], gradients: Floats) -> Floats:
    """Linear interpolation in log-log, where N^-a is a straight line; beyond the ends with the slope at the end."""
    x, y = np.log(np.array(points)).T
    at = np.log(gradients)
    inside = np.interp(at, x, y)
    first, last = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])
    inside = np.where(at < x[0], y[0] + first * (at - x[0]), inside)
    ln_updates = np.where(at > x[-1], y[-1] + last * (at - x[-1]), inside)
    return np.asarray(np.exp(np.clip(ln_updates, -_LN_MOST, _LN_MOST)), dtype=np.float64)
