"""PixelCNN on CIFAR-10: test NLL over time for one worker, async, full sync and sync with a backup, on 8 and 16."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from experiments.common.command import Options, main
from experiments.common.curves import Point
from experiments.common.race import Race, Trial
from experiments.common.race_command import RaceExperiment
from experiments.common.trials import Found
from experiments.pixelcnn.settings import FULL, QUICK
from experiments.pixelcnn.training import train
from quorate.tasks.cifar10 import load_cifar10


class PixelCnnRace(RaceExperiment):
    name = "pixelcnn"
    what = "Is async worse than one worker, and how much sooner is sync with a backup, on a PixelCNN?"
    takes = "one GPU, some 16 minutes for one step, and longer for the slow decay"
    full, quick = FULL, QUICK

    def training(self, options: Options) -> Callable[[Trial], list[Point]]:
        if not options.quick:
            load_cifar10(options.data)  # fetched once, not by every process; and what is missing is said at once
        return partial(train, data=options.data, device=options.device, quick=options.quick)

    def more(self, race: Race, found: Found[Trial, Point], folder: Path) -> list[Path]:
        from experiments.pixelcnn.results import write

        return write(race, found, folder) if any(trial.protocol for trial in found) else []


EXPERIMENT = PixelCnnRace()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
