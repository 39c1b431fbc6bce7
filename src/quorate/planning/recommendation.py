"""The recommended split with its reason, and the conditions for another split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quorate.number_format import number, percent, seconds, three
from quorate.planning.other_policies import Estimate
from quorate.planning.splits import SplitTimes
from quorate.planning.world import FINISH, Effort, Floats
from quorate.policies import POLICIES, BackupSync, FullSync

DEFAULT_INTERVAL = 0.05  # half the width of the 95 % interval, as a share of the mean
_NOISES = np.logspace(-2, 4, 241)  # B_noise/B: from hardly any noise to noise-dominated
_AS_GOOD = 1.02  # a split within this factor of the best counts as equally good
_SAME = 1e-9  # tolerance for times from a formula


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommended split."""

    policy: str  # backup, or full-sync if no backup pays
    quorum: int
    backups: int
    seconds_per_update: float
    time: float  # to the target: in seconds if updates are counts, else relative to the fewest updates
    speedup: float | None  # over waiting for all; None if that time is infinite or unknown
    speedup_low: float | None  # 95 % interval; if waiting for all is estimated, this end uses the observed times only
    speedup_high: float | None
    is_guess: bool  # whether the time of waiting for all is an estimate
    is_kept: bool  # whether it is the recorded split, because no other can be judged
    equals: tuple[str, ...]  # splits with more backups that are statistically equal
    reason: str
    changes: tuple[str, ...]  # conditions under which another split would be better

    @property
    def split(self) -> str:
        return f"{self.quorum}+{self.backups}"

    @property
    def speedup_interval(self) -> str:
        """The interval of the speed-up in parentheses; empty if it is not known."""
        low, high = self.speedup_low, self.speedup_high
        if low is None or high is None or not math.isfinite(high) or high <= low:
            return ""
        maybe = "; it is partly a guess" if self.is_guess else ", so it may be chance" if low < 1.0 else ""
        return f" (95 %: {three(low)} to {three(high)}{maybe})"

    def python(self, late: str) -> str:
        """The policy as Python code."""
        if not self.backups:
            return "quorate.FullSync()"
        finish = ', late="finish"' if late == FINISH else ""
        return f"quorate.BackupSync({self.quorum}, {self.backups}{finish})"

    def command(self, late: str) -> str:
        """The policy as a command line."""
        if not self.backups:
            return f"quorate train --workers {self.quorum}"
        return f"quorate train --workers {self.split}{' --late finish' if late == FINISH else ''}"


def times_to_target(times: SplitTimes, effort: Effort) -> tuple[Floats, Floats]:
    """(updates relative to the fewest, time) of every split; time is in seconds if updates are counts."""
    updates = effort.updates(times.gradients)
    relative = updates / updates.min()
    return relative, times.mean * (updates if effort.is_absolute else relative)


def recommend(
    times: SplitTimes,
    effort: Effort,
    known: int,
    interval: float = DEFAULT_INTERVAL,
    least_all_s: float | None = None,
    kept_quorum: int | None = None,
) -> Recommendation:
    """The split with the least time to the target among the first `known` ones; of equal splits the fewest backups.

    interval: the most that a tie may cost, as a share of the time.
    least_all_s: lower bound on waiting for all workers, if that time is partly estimated.
    kept_quorum: the quorum to keep, if workers shared cores and no other split can be judged; 0 if the run had
        another number of machines.
    """
    relative, time = times_to_target(times, effort)
    machines = len(time)
    candidates = np.where(np.arange(machines) < known, time, math.inf)
    best = int(np.argmin(candidates))
    costs = candidates / candidates[best] - 1.0
    ties = [place for place in range(machines) if costs[place] <= min(interval, times.unsure(place, best)) + _SAME]
    place = ties[-1] if kept_quorum is None else (kept_quorum or machines) - 1
    backups = machines - place - 1
    speedup = low = high = None
    equals: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    reason = "workers that share cores slow each other down, and how much depends on the split"
    if kept_quorum is None:
        if math.isfinite(time[-1]) and known == machines:
            speedup = float(time[-1] / time[place])
            spread = 1.0 + times.unsure(machines - 1, place)
            low, high = speedup / spread, speedup * spread
            if least_all_s is not None and backups:
                low *= min(1.0, least_all_s / float(times.mean[-1]))
        equals = tuple(_split(tie, machines) for tie in reversed(ties[:-1]))
        reason = _reason(times, relative, time, place, speedup)
        if equals:
            reason += f"; {_equal(equals, times, costs, place, best)}"
        changes = tuple(_changes(times, effort, time, place, known))
    return Recommendation(
        policy=BackupSync.name if backups else FullSync.name,
        quorum=place + 1,
        backups=backups,
        seconds_per_update=math.nan if kept_quorum == 0 else float(times.mean[place]),
        time=float(time[place]),
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        is_guess=least_all_s is not None,
        is_kept=kept_quorum is not None,
        equals=equals,
        reason=reason,
        changes=changes,
    )


def _equal(equals: tuple[str, ...], times: SplitTimes, costs: Floats, place: int, best: int) -> str:
    """Why this split, if several are statistically equal."""
    names = equals[0] if len(equals) == 1 else f"{', '.join(equals[:-1])} and {equals[-1]}"
    are = "is" if len(equals) == 1 else "are"
    unsure = times.unsure(place, best)
    how = f" ({percent(costs[place])} apart, ±{percent(unsure)})" if place != best and math.isfinite(unsure) else ""
    return f"{names} {are} equal to it as far as can be told{how}, and of equal splits it has the fewest backups"


def _reason(times: SplitTimes, relative: Floats, time: Floats, place: int, speedup: float | None) -> str:
    machines, mean = len(time), times.mean
    if place == machines - 1:
        if machines == 1:
            return "there is one machine"
        other = int(np.argmin(time[:-1]))
        slower, needs = mean[-1] / mean[other] - 1.0, relative[other] / relative[-1] - 1.0
        waits = f"{percent(slower)} longer an update than" if slower >= 0.0005 else "no longer an update than"
        return (
            f"waiting for all {machines} takes {waits} {_split(other, machines)}, "
            f"which needs {_more(needs)} updates: no backup pays"
        )
    longer = mean[-1] / mean[place] - 1.0
    lasts = (
        f"takes {percent(longer)} longer an update" if longer < 1 else f"takes {three(longer + 1)}× as long an update"
    )
    if speedup is None:  # a lower bound on the time of all is no basis for a speed-up
        lasts = "never ends on average" if math.isinf(mean[-1]) else "takes longer than the run shows"
    extra = relative[place] / relative[-1] - 1.0
    gain = "" if speedup is None else f", so the target is reached {three(speedup)}× as fast"
    last = machines - place - 1
    some = "the last gradient" if last == 1 else f"the last {last} gradients"
    price = f"costs {percent(extra)} more updates" if extra >= 0 else f"saves {percent(-extra)} of the updates"
    return f"waiting for {some} {lasts}, and doing without {price}{gain}"


def _changes(times: SplitTimes, effort: Effort, time: Floats, place: int, known: int) -> list[str]:
    """Conditions under which another split would be better."""
    found: list[str] = []
    machines = len(time)
    if effort.noise_in_batches is not None and machines > 1:
        costs = times.mean[:known] * (1.0 + _NOISES[:, None] / times.gradients[:known])
        best = np.argmin(costs, axis=1)
        good = np.flatnonzero(costs[:, place] <= _AS_GOOD * costs.min(axis=1))
        if len(good) and good[0] > 0:
            low = int(good[0])
            found.append(
                f"{_split(int(best[low - 1]), machines)} if the noise scale were below {_batches(_NOISES[low])}"
            )
        if len(good) and good[-1] < len(_NOISES) - 1:
            high = int(good[-1])
            what = "it" if found else "the noise scale"
            found.append(f"{_split(int(best[high + 1]), machines)} if {what} were above {_batches(_NOISES[high])}")
    if place < machines - 1 and math.isfinite(time[-1]):
        even = times.mean[-1] * time[place] / time[-1]
        now = f"now {seconds(times.mean[-1])}" if known == machines else "not seen"
        found.append(
            f"{_split(machines - 1, machines)} if waiting for all took under {seconds(even)} an update ({now})"
        )
    return found


def _split(place: int, machines: int) -> str:
    return f"{place + 1}+{machines - place - 1}"


def _more(share: float) -> str:
    return f"{percent(share)} more" if share >= 0 else f"{percent(-share)} fewer"


def _batches(count: float) -> str:
    text = number(count)
    return f"{text} batch" if text == "1" else f"{text} batches"


_AHEAD = 0.9995  # share of the recommended time; below it, the three digits of the table show a difference


def why_not(others: tuple[Estimate, ...], found: Recommendation) -> list[str]:
    """A sentence for each policy without staleness that is faster than the recommendation in the table."""
    return [
        f"{one.label} is ahead in the table below, by {percent(found.time / one.time - 1.0)}, and not recommended: "
        f"{POLICIES[one.policy].drawback}, and its figure is simulated, not measured; to try it: "
        f"quorate train --policy {one.policy} --workers {found.split}"
        for one in others
        if POLICIES[one.policy].drawback and one.time < _AHEAD * found.time
    ]
