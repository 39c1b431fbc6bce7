"""Layer staleness: asynchronous workers that read and write a net layer by layer.

python -m experiments.layers run [--processes N]       in virtual time; the data come with the library
python -m experiments.layers run --quick --out DIR     the same path in seconds
python -m experiments.layers figures                   figures and tables from the committed results
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.layers.study import (
    QUICK,
    Depth,
    Point,
    Setting,
    Staleness,
    Training,
    run_depth,
    run_training,
    wanted_depths,
    wanted_trainings,
)


class Layers(Experiment):
    """Staleness by depth, and what reading and writing by layer does to a training."""

    name = "layers"
    what = (
        "How stale is each layer's gradient where parameters are read and written layer by layer, and does it matter?"
    )
    takes = "one CPU core, some 5 minutes"

    def run(self, options: Options) -> bool:
        """Staleness first, then trainings."""
        setting = QUICK if options.quick else Setting()
        return run_studies(
            options,
            Study(_depths(options.out), lambda _: wanted_depths(setting), run_depth),
            Study(_trainings(options.out), lambda found: wanted_trainings(setting, found), run_training),
        )

    def figures(self, folder: Path) -> list[Path]:
        """Everything from the two tables."""
        from experiments.layers.figures import draw_depth, draw_training
        from experiments.layers.tables import text

        depths, trainings = read_all(self.name, folder, _depths(folder), _trainings(folder))
        files = [folder / name for name in ("depth.png", "training.png", "summary.md")]
        draw_depth(files[0], depths)
        draw_training(files[1], trainings)
        files[2].write_text(text(depths, trainings))
        return files


def _depths(folder: Path) -> Table[Depth, Staleness]:
    return Table(folder / "depth.csv", Depth, Staleness)


def _trainings(folder: Path) -> Table[Training, Point]:
    return Table(folder / "training.csv", Training, Point)


EXPERIMENT = Layers()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
