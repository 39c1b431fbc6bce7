"""Language: does it generalise? A character transformer on 16 machines under four policies."""

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
from experiments.language.settings import FULL, QUICK
from experiments.language.training import train
from quorate.tasks.charlm import load_shakespeare


class Language(RaceExperiment):
    name = "language"
    what = "Which policy trains a character transformer soonest and best on 16 machines?"
    takes = "one GPU, some 4 minutes"
    full, quick = FULL, QUICK

    def training(self, options: Options) -> Callable[[Trial], list[Point]]:
        if not options.quick:
            load_shakespeare(options.data)  # fetched once, not by every process; and what is missing is said at once
        return partial(train, data=options.data, device=options.device, quick=options.quick)

    def more(self, race: Race, found: Found[Trial, Point], folder: Path) -> list[Path]:
        from experiments.language import results

        if not any(race.method(trial.method) in race.untuned for trial in found):
            return []
        files = [folder / "backups.md", folder / "backups.png"]
        files[0].write_text(f"Test loss in nats, mean ± 95 % interval\n\n{results.table(race, found)}")
        results.draw(files[1], race, found)
        return files


EXPERIMENT = Language()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
