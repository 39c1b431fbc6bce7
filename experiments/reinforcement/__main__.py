"""Reinforcement: does it generalise? Policy gradient on CartPole, on 16 machines under four policies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from experiments.common.command import Options, main
from experiments.common.curves import Point
from experiments.common.race import Trial
from experiments.common.race_command import RaceExperiment
from experiments.reinforcement.settings import FULL, QUICK
from experiments.reinforcement.training import train


class Reinforcement(RaceExperiment):
    name = "reinforcement"
    what = "Which policy learns to balance a pole soonest and best on 16 machines?"
    takes = "two CPU cores, 30 minutes"
    full, quick = FULL, QUICK
    digits = 0

    def training(self, options: Options) -> Callable[[Trial], list[Point]]:
        return partial(train, quick=options.quick)  # on the CPU, whatever the device: a step is a few hundred numbers


EXPERIMENT = Reinforcement()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
