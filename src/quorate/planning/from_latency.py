"""A world from a latency model: rounds of all machines, drawn from it one after the other."""

from __future__ import annotations

import numpy as np

from quorate.latency import Latency
from quorate.planning.regimes import find_regimes
from quorate.planning.world import World

_MOST_DRAWS = 300_000
_MOST_ROUNDS, _FEWEST_ROUNDS = 10_000, 1_000


def world_of_latency(latency: Latency, machines: int, seed: int = 0) -> World:
    """Rounds that wait for all: the next one opens when the slowest is done, as slow spells go by the clock."""
    draw = latency.sampler(seed, machines)
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, _MOST_DRAWS // machines))
    seconds = np.empty((rounds, machines))
    span = np.empty(rounds)
    time_s = 0.0
    for row in range(rounds):
        times = [draw(worker, row, row, time_s) for worker in range(machines)]
        seconds[row] = times
        span[row] = max(times)
        time_s += max(times)
    return World(
        source=f"latency {latency.text()}",
        seconds=seconds,
        span_s=span,
        regimes=find_regimes(seconds),
        workers=tuple(range(machines)),
    )
