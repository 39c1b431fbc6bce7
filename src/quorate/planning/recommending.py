"""One split out of all, in a sentence with its reason, and when another would be better."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quorate.planning.splits import SplitTimes
from quorate.planning.updates import Effort
from quorate.planning.world import Floats

_NOISES = np.logspace(-2, 4, 241)  # B_noise/B: from hardly any noise to nothing but
_AS_GOOD = 1.02  # a split within so much of the best is as good


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Which split to take."""

    policy: str  # backup, or full-sync where no backup pays
    quorum: int
    backups: int
    seconds_per_update: float
    time: float  # to the target: seconds where updates are known, else per update that all machines would make
    speedup: float | None  # over waiting for all; None where that never ends, or was not seen
    reason: str
    changes: tuple[str, ...]  # when it would be another


def times_to_target(times: SplitTimes, effort: Effort) -> tuple[Floats, Floats]:
    """(updates relative to the fewest, time) of every split; time is in seconds if updates are known as counts."""
    updates = effort.updates(times.gradients)
    relative = updates / updates.min()
    return relative, times.mean * (updates if effort.is_absolute else relative)


def recommend(times: SplitTimes, effort: Effort, known: int) -> Recommendation:
    """The split with the least time to the target, among those that were seen."""
    relative, time = times_to_target(times, effort)
    machines = len(time)
    candidates = np.where(np.arange(machines) < known, time, math.inf)
    place = int(np.argmin(candidates))
    backups = machines - place - 1
    speedup = float(time[-1] / time[place]) if math.isfinite(time[-1]) and known == machines else None
    return Recommendation(
        policy="backup" if backups else "full-sync",
        quorum=place + 1,
        backups=backups,
        seconds_per_update=float(times.mean[place]),
        time=float(time[place]),
        speedup=speedup,
        reason=_reason(times, relative, time, place, speedup),
        changes=tuple(_changes(times, effort, time, place, known)),
    )


def _reason(times: SplitTimes, relative: Floats, time: Floats, place: int, speedup: float | None) -> str:
    machines, mean = len(time), times.mean
    if place == machines - 1:
        if machines == 1:
            return "there is one machine"
        other = int(np.argmin(time[:-1]))
        slower, needs = mean[-1] / mean[other] - 1.0, relative[other] / relative[-1] - 1.0
        waits = f"{slower:.1%} longer an update than" if slower >= 0.0005 else "no longer an update than"
        return (
            f"waiting for all {machines} takes {waits} {_split(other, machines)}, "
            f"which needs {_more(needs)} updates: no backup pays"
        )
    longer = mean[-1] / mean[place] - 1.0
    lasts = f"takes {longer:.0%} longer an update" if longer < 10 else f"takes {longer + 1:,.3g}× as long an update"
    if speedup is None:  # what is not seen has a lower bound, which is no basis for a gain
        lasts = "never ends on average" if math.isinf(mean[-1]) else "takes longer than the run shows"
    extra = relative[place] / relative[-1] - 1.0
    gain = "" if speedup is None else f", so the target is reached {speedup:.2f}× as fast"
    last = machines - place - 1
    some = "the last gradient" if last == 1 else f"the last {last} gradients"
    price = f"costs {extra:.1%} more updates" if extra >= 0 else f"saves {-extra:.1%} of the updates"
    return f"waiting for {some} {lasts}, and doing without {price}{gain}"


def _changes(times: SplitTimes, effort: Effort, time: Floats, place: int, known: int) -> list[str]:
    """What would have to be different for another split to win."""
    found: list[str] = []
    machines = len(time)
    if effort.noise_in_batches is not None and machines > 1:
        costs = times.mean[:known] * (1.0 + _NOISES[:, None] / times.gradients[:known])
        best = np.argmin(costs, axis=1)
        good = np.flatnonzero(costs[:, place] <= _AS_GOOD * costs.min(axis=1))
        if len(good) and good[0] > 0:
            low = int(good[0])
            found.append(
                f"{_split(int(best[low - 1]), machines)} if the noise scale were below {_short(_NOISES[low])} batches"
            )
        if len(good) and good[-1] < len(_NOISES) - 1:
            high = int(good[-1])
            what = "it" if found else "the noise scale"
            found.append(
                f"{_split(int(best[high + 1]), machines)} if {what} were above {_short(_NOISES[high])} batches"
            )
    if place < machines - 1 and math.isfinite(time[-1]):
        even = times.mean[-1] * time[place] / time[-1]
        now = f"now {times.mean[-1]:.4g} s" if known == machines else "not seen"
        found.append(f"{_split(machines - 1, machines)} if waiting for all took under {even:.4g} s an update ({now})")
    return found


def _split(place: int, machines: int) -> str:
    return f"{place + 1}+{machines - place - 1}"


def _more(share: float) -> str:
    return f"{share:.1%} more" if share >= 0 else f"{-share:.1%} fewer"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
