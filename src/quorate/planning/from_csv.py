"""A world from a CSV of step times, as `quorate.measure` writes it in a script that knows nothing else of quorate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quorate.planning._filling import fill_in
from quorate.planning.regimes import find_regimes
from quorate.planning.step_times import read_step_times
from quorate.planning.world import World


def world_of_csv(paths: Sequence[Path]) -> World:
    """Every step is a round: the workers of such a script wait for each other in each."""
    found = read_step_times(paths)
    workers = found.workers
    column_of = {worker: column for column, worker in enumerate(workers)}
    seconds = np.full((len(found.times), len(workers)), np.nan)
    for row, step in enumerate(sorted(found.times)):
        for worker, took in found.times[step].items():
            seconds[row, column_of[worker]] = took
    regimes = find_regimes(seconds)
    seconds, _ = fill_in(seconds, ~np.isnan(seconds), regimes, np.random.default_rng(0))
    return World(
        source=f"step times {', '.join(repr(str(path)) for path in paths)}",
        seconds=seconds,
        span_s=seconds.max(axis=1),
        regimes=regimes,
        workers=tuple(workers),
        notes=tuple(found.notes),
    )
