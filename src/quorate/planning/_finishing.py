"""Late work that is left to finish: a straggler is still busy when the next round opens, so rounds hang together.

No formula is exact then, so rounds are played one after the other, for all splits at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quorate.planning.world import Floats, World

_MOST_CELLS = 40_000_000  # rounds × splits × machines: a second or two
_MOST_ROUNDS, _FEWEST_ROUNDS = 6_000, 60
_ROUGHLY = 8


class Finished(NamedTuple):
    updates: Floats  # (rounds, splits): seconds of each update
    wasted: Floats  # (splits,)
    transfers: Floats  # (splits,)


def let_finish(world: World, roughly: bool = False) -> Finished:
    """Play rounds in which a late worker first finishes what it has, and then takes part in the open round."""
    machines = world.machines
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, _MOST_CELLS // machines**2) // (_ROUGHLY if roughly else 1))
    warm_up = rounds // 10  # until stragglers are spread over their work as they will be
    quorum = np.arange(machines)  # the place of the N-th arrival, by split
    splits = np.arange(machines)
    now = np.zeros(machines)  # by split
    free = np.zeros((machines, machines))  # split, worker: when what it is busy with is done
    updates = np.empty((rounds, machines))
    useful, wasted, sent = np.zeros(machines), np.zeros(machines), np.zeros(machines)
    pick = _RowPicker(world)
    for row in range(-warm_up, rounds):
        needs = pick.rows(now, row + warm_up)
        begins = np.maximum(now[:, None], free)
        arrives = begins + needs
        closes = np.sort(arrives, axis=1)[splits, quorum]
        starts = begins < closes[:, None]  # the others were busy with older work all the time
        late = starts & (arrives > closes[:, None])
        opens = closes + world.overhead_s
        if row >= 0:
            updates[row] = opens - now
            useful += np.where(starts & ~late, needs, 0.0).sum(axis=1)
            wasted += np.where(late, needs, 0.0).sum(axis=1)
            sent += 2.0 * starts.sum(axis=1)
        free = np.where(late, arrives, np.where(starts, opens[:, None], free))
        now = opens
    return Finished(updates, wasted / (useful + wasted), sent / rounds)


class _RowPicker:
    """Which recorded round a split meets: those of a stretch in their order, stretches by the clock."""

    def __init__(self, world: World) -> None:
        self._seconds = world.seconds
        self._begins = np.array([regime.start for regime in world.regimes])
        self._lengths = np.array([regime.stop - regime.start for regime in world.regimes])
        self._until_s = np.cumsum([world.span_s[regime].sum() for regime in world.regimes])

    def rows(self, now: Floats, number: int) -> Floats:
        if len(self._begins) == 1:
            alike: Floats = self._seconds[number % len(self._seconds)][None, :]
            return alike
        stretch = np.searchsorted(self._until_s, now % self._until_s[-1], side="right")
        stretch = np.minimum(stretch, len(self._begins) - 1)
        rows: Floats = self._seconds[self._begins[stretch] + number % self._lengths[stretch]]
        return rows
