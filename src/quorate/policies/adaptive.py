"""A quorum that is chosen while training, from the arrivals and the noise scale seen so far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from quorate.errors import BadInput, check_at_least
from quorate.events import Action, Choose, SetTimer, Ticket
from quorate.policies.arrival_times import (
    excess,
    gaps,
    has_changed,
    has_slowed,
    means,
    patience,
    places_of,
    times_of,
    waits,
)
from quorate.policies.base import Flag
from quorate.policies.rounds import TimedRoundPolicy

MEMORY_ROUNDS, MEMORIES = 400, 4  # rounds remembered for a number of live workers; numbers of live workers remembered
WARM_UP_ROUNDS = 5  # rounds that wait for all workers before the first choice
YOUNG_ROUNDS, GUARD = 40, 2.0  # the first rounds may last at most GUARD times the expected time
LOOK_EVERY = 3  # at most one round in three looks beyond the quorum
ENOUGH_LOOKS = 40  # after 40 remembered looks, looks come half as often; after 80, a third as often …
DECIDE_EVERY = 8  # rounds between two decisions whether another quorum is better
MARGIN = 0.01  # relative advantage that another quorum must have
DWELL_ROUNDS = 4  # rounds that a choice lasts at least; before a higher quorum, times (1 + switches)²
LONGEST_WAIT = 4.0  # longest duration of a look, in rounds
TEST_EVERY = 8  # rounds between two tests whether the cluster has changed
QUICK_ROUNDS, RECENT_ROUNDS = 8, 24  # recent rounds that these tests compare with the rounds before


class AdaptiveBackup(TimedRoundPolicy):
    """Backup workers with a learned quorum: the one with the most progress a second, as in DBW and AdaSync.

    The progress of a version made of k gradients is 1/(1 + noise scale/(k·batch)), and simply k while the noise
    scale is not known. Its time is the mean time of the k-th arrival. A round that closes at its quorum does not see
    later arrivals. So now and then a round looks further: it waits for later arrivals as long as that may be worth it.

    noise_scale: in samples, if it is known beforehand; otherwise it is estimated from the gradients.
    min_quorum: the smallest quorum.
    explore: share of the progress that looking further may cost.
    (Xu et al., 2020, "Dynamic backup workers"; Dutta et al., 2018, "Slow and stale gradients can win the race".)
    """

    name = "adaptive"
    colour = "#882255"  # not from the palette, but distinct from all of its colours
    flags: ClassVar = {
        "noise_scale": Flag("Gradient noise scale in samples.", "SAMPLES", "learned"),
        "min_quorum": Flag("The smallest quorum to choose."),
        "explore": Flag("Share of progress that looking beyond the quorum may cost.", "SHARE"),
    }
    wants_noise = True

    def __init__(
        self, noise_scale: float | None = None, min_quorum: int = 1, explore: float = 0.02, late: str = "cancel"
    ) -> None:
        super().__init__(late)
        if noise_scale is not None and not (noise_scale >= 0 and math.isfinite(noise_scale)):
            raise BadInput(f"noise_scale is {noise_scale}, but it is a number of samples; leave it out to learn it")
        if not 0 <= explore <= 0.5:
            raise BadInput(f"explore is {explore}, but it is a share of the progress, between 0 and 0.5")
        self.noise_scale = noise_scale
        self.min_quorum = check_at_least("min_quorum", min_quorum, 1)
        self.explore = explore

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.min_quorum > workers:
            raise BadInput(
                f"min_quorum is {self.min_quorum}, but the run has {workers} workers; lower it or add workers"
            )

    @property
    def per_update(self) -> int:
        """The number of arrivals that this round waits for."""
        return self._places[self._target - 1]

    @property
    def needed(self) -> int:
        return self.min_quorum

    @property
    def quorum(self) -> int:
        """The quorum that is chosen now; a round may look further."""
        return self._places[self._place - 1]

    # ------------------------------------------------------------ state

    def reset(self, workers: int) -> None:
        super().reset(workers)
        self._noise = self.noise_scale
        self._samples = 1  # of one arrival
        self._memory: dict[int, deque[list[float]]] = {}  # number of live workers -> the rounds seen with it
        self._is_announced = False
        self._since_change = MEMORY_ROUNDS
        self._opened_at = 0.0
        self._closing = False
        self._n = 0
        self._reason = self._meet(workers)
        self._plan(self._top, self._half(), None)

    def _meet(self, workers: int) -> str:
        """Adapt to a new number of live workers; returns the reason for the quorum that follows."""
        self._n = workers
        self._memory[workers] = self._memory.pop(workers, deque(maxlen=MEMORY_ROUNDS))
        for oldest in list(self._memory)[:-MEMORIES]:
            del self._memory[oldest]
        self._places = places_of(workers)
        self._top = len(self._places)
        self._floor = next(
            place for place, count in enumerate(self._places, 1) if count >= min(self.min_quorum, workers)
        )
        return self._start_anew("nothing is known yet")

    def _start_anew(self, why: str) -> str:
        """Reset the choice, and wait for all workers again unless enough rounds are remembered; returns the reason."""
        self._switches = self._looks = self._since_look = self._since_switch = self._since_decision = 0
        self._credit = self._rate = 0.0
        self._place = self._top
        known = len(self._rounds)
        self._warm_up = max(0, WARM_UP_ROUNDS - known)
        if not self._warm_up:
            return self._first_choice()
        return f"{self.quorum} of {self._n}: {why}, so {self._warm_up} rounds look at all workers, though not for long"

    @property
    def _rounds(self) -> deque[list[float]]:
        return self._memory[self._n]

    def _half(self) -> int:
        """The place at which half the workers have arrived."""
        return max(self._floor, next(place for place, count in enumerate(self._places, 1) if 2 * count >= self._n))

    # ------------------------------------------------------------ a round

    def _plan(self, target: int, base: int, wait_s: float | None) -> None:
        """Let this round wait for place `target`, at most `wait_s` after place `base` (None: as long again)."""
        self._target, self._base, self._wait_s = target, base, wait_s
        self._times: list[float] = []
        self.time_is_up = self._is_disturbed = False

    def opened(self, time: float) -> list[Action]:
        reason = None
        if self._closing:
            self._closing = False
            reason = self._take_in(time)
        workers = len(self.live) or self.workers
        if workers != self._n:
            reason = self._meet(workers)
        if self._warm_up:
            self._plan(self._top, self._half(), None)
        else:
            self._plan(*self._look_further())
        self._opened_at = time
        if reason is not None:
            self._reason, self._is_announced = reason, False
        if self._is_announced:
            return []
        self._is_announced = True
        return [Choose(self.quorum, self._reason)]

    def arrived(self, time: float, ticket: Ticket) -> Iterable[Action]:
        version = self.version
        if ticket.version == version:
            self._samples = max(self._samples, ticket.samples)  # the last batch of an epoch may be small
            reached = len(self._times)
            if reached < self._top and len(self.arrivals) + 1 == self._places[reached]:
                self._times.append(time - self._opened_at)
        actions = super().arrived(time, ticket)
        just_there = ticket.version == version == self.version and len(self._times) == self._base < self._target
        if just_there and self._places[self._base - 1] == len(self.arrivals):
            wait_s = self._times[-1] if self._wait_s is None else self._wait_s
            looking = self._warm_up or self._target > self._place
            return [*actions, SetTimer(time + wait_s, version, "looking further" if looking else "more than expected")]
        return actions

    def why(self) -> str:
        have = len(self.arrivals)
        if have >= self.per_update:
            return "quorum reached" if self._target == self._place else "looked further"
        if self.idle:
            return super().why() if have <= self.quorum else "looked further, all that was left of the epoch"
        if self.time_is_up:
            return "time is up" if have < self.quorum else "looked further, time is up"
        return "all live workers are in"

    def close(self, time: float) -> Iterable[Action]:
        self._closing = True
        self._is_disturbed |= bool(self.idle or self._must)
        return super().close(time)

    def joined(self, time: float, worker: int) -> list[Action]:
        actions = super().joined(time, worker)
        self._is_disturbed |= time > self._opened_at
        return actions

    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> Iterable[Action]:
        self._is_disturbed = True
        return super().lost(time, worker, tickets)

    def withdrawn(self, time: float, ticket: Ticket) -> list[Action]:
        self._is_disturbed = True
        return super().withdrawn(time, ticket)

    def learned(self, noise_scale: float) -> list[Action]:
        if self.noise_scale is None:
            self._noise = noise_scale
        return []

    # ------------------------------------------------------------ learning from a round

    def _take_in(self, time: float) -> str | None:
        """Remember the round that has closed; returns the reason if the quorum changes, else None."""
        reached, closed = len(self._times), time - self._opened_at
        whole = reached >= self._target or self.time_is_up
        if self._is_disturbed or not whole or not reached or len(self.live) != self._n:
            return None
        self._rounds.append([self._target, closed, *self._times])
        self._since_look += 1
        self._since_change += 1
        self._since_switch += 1
        self._since_decision += 1
        if self._warm_up:
            self._warm_up -= 1
            return None if self._warm_up else self._first_choice()
        looked = self._target > self._place
        self._pay(closed, reached if looked else None)
        if self._cluster_has_changed(looked):
            return self._start_anew("the cluster has changed")
        young = len(self._rounds) < YOUNG_ROUNDS
        if self._since_decision >= (2 if young else DECIDE_EVERY):
            return self._choose_again()
        return None

    def _pay(self, closed: float, looked_to: int | None) -> None:
        """Account for looking further: it costs the progress of the extra time, less the progress that it brought."""
        here = self._gain(self._place)
        self._credit += self.explore * here
        if looked_to is not None:
            brought = self._gain(looked_to) - here
            self._credit += brought - self._rate * (closed - self._times[self._place - 1])
            self._since_look = 0
        self._credit = min(max(self._credit, -here), self._gain(self._top))

    def _cluster_has_changed(self, looked: bool) -> bool:
        """Whether the last rounds differ from the rounds before; if so, all rounds are forgotten."""
        found = False
        # With few remembered rounds, the means follow a change by themselves. A cluster that changes again and again
        # is merely uneven in time, so a change is not looked for soon after another.
        if min(2 * len(self._rounds), self._since_change) < MEMORY_ROUNDS:
            return False
        if self._since_switch % TEST_EVERY == 0:
            times = times_of(self._rounds, self._place)
            found = has_slowed(times, QUICK_ROUNDS) or has_changed(times, RECENT_ROUNDS)
        if looked and not found:
            found = has_changed(waits(self._rounds, self._place, self._place + 1), QUICK_ROUNDS)
        if found:
            self._rounds.clear()
            self._since_change = 0
        return found

    # ------------------------------------------------------------ choosing

    def _gain(self, place: int) -> float:
        """Progress of a version made of the arrivals up to this place."""
        count = self._places[place - 1]
        if self._noise is None:
            return float(count)
        return 1.0 / (1.0 + self._noise / (count * self._samples))

    def _rates(self, careful_from: int) -> list[float]:
        """Progress a second with each place as the quorum; 0 for a place below `min_quorum` or of unknown time."""
        times = means(gaps(self._rounds, self._top), careful_from)
        return [
            0.0 if time is None or place < self._floor else self._gain(place) / max(time, 1e-12)
            for place, time in enumerate(times, start=1)
        ]

    def _first_choice(self) -> str:
        rates = self._rates(self._top)
        self._place = 1 + max(range(self._top), key=rates.__getitem__)
        self._rate = rates[self._place - 1]
        self._since_switch = self._since_decision = 0
        return self._explain(rates)

    def _choose_again(self) -> str | None:
        """Another quorum, if it is better by more than a margin."""
        self._since_decision = 0
        rates, here = self._rates(self._place), self._place
        now = self._rate = rates[here - 1]
        best = 1 + max(range(self._top), key=rates.__getitem__)
        if best == here:
            return None
        # The times of lower quorums are known. A higher quorum may turn out worse, so it is tried ever less often.
        if self._since_switch < DWELL_ROUNDS * (1 if best < here else (1 + self._switches) ** 2):
            return None
        if rates[best - 1] < (1 + MARGIN) * now:
            return None
        self._place, self._rate = best, rates[best - 1]
        self._switches += 1
        self._since_switch = 0
        return self._explain(rates, here)

    def _explain(self, rates: list[float], before: int | None = None) -> str:
        """The reason of a choice: its expected rate, and that of the quorum before or the next best."""
        place = self._place
        if before is None:
            others = [other for other in range(1, self._top + 1) if other != place and rates[other - 1] > 0]
            before = max(others, key=lambda other: rates[other - 1], default=None)
        unit = "gradients/s" if self._noise is None else "noise-free steps/s"
        against = "" if before is None else f" against {rates[before - 1]:.3g} at {self._places[before - 1]}"
        if self._noise is None:
            why = "noise scale unknown, so every gradient counts the same"
        else:
            why = f"noise scale {self._noise:.3g} samples, {self._samples} a gradient"
        return f"{self.quorum} of {self._n}: {rates[place - 1]:.3g} {unit}{against}; {why}"

    # ------------------------------------------------------------ looking further

    @property
    def _look_every(self) -> int:
        """Rounds from one look to the next: the more looks are remembered, the fewer are needed."""
        return LOOK_EVERY * (1 + sum(one[0] > self._place for one in self._rounds) // ENOUGH_LOOKS)

    def _look_further(self) -> tuple[int, int, float | None]:
        """The arguments of `_plan` for the next round: the quorum, or a later place for as long as it may be worth."""
        place = self._place
        ordinary: tuple[int, int, float | None] = place, place, None
        if len(self._rounds) < YOUNG_ROUNDS and self._rate:
            # A first choice may be far off, so rounds have a time limit.
            ordinary = place, min(place, self._half()), GUARD * self._gain(place) / self._rate
        if place == self._top or self._since_look + 1 < LOOK_EVERY or not self._rate:
            return ordinary
        turn = self._looks + 1
        target = min(self._top, place + (turn & -turn))  # one further, every other time two, then four …
        worth = self._gain(target) - self._gain(place)
        if self._credit < worth or self._since_look + 1 < self._look_every:
            return ordinary
        self._looks = turn
        wait_s = patience(*excess(self._rounds, place, target), worth / self._rate)
        return target, place, min(wait_s, LONGEST_WAIT * self._gain(place) / self._rate)
