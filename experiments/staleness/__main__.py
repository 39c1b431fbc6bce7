"""Test error against staleness, on MNIST.

python -m experiments.staleness run --data DIR --device cuda --processes 12   the whole study; goes on where it stopped
python -m experiments.staleness run --quick --out DIR                         seconds, on made-up pictures
python -m experiments.staleness figures                                       the figures and tables from the curves
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.curves import Point
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.staleness.settings import FULL, QUICK, Trial, final_error, wanted
from experiments.staleness.training import train
from quorate.tasks.mnist import load_mnist


class Staleness(Experiment):
    name = "staleness"
    what = "Test error of a small net on MNIST whose gradients are all used 0 to 125 updates late, and what repairs it."
    takes = "one GPU, some 15 minutes"

    def run(self, options: Options) -> bool:
        if not options.quick:
            load_mnist(options.data)  # fetched once, not by every process; and what is missing is said at once
        training = partial(train, data=options.data, device=options.device, quick=options.quick)
        trials = partial(wanted, length=QUICK if options.quick else FULL)
        return run_studies(options, Study(_table(options.out), trials, training, _tell))

    def figures(self, folder: Path) -> list[Path]:
        from experiments.staleness.figures import draw_all

        (found,) = read_all(self.name, folder, _table(folder))
        is_full = {trial.epochs for trial in found} <= {FULL.epochs, FULL.tuning_epochs}
        return draw_all(folder, found, FULL if is_full else QUICK)


def _table(folder: Path) -> Table[Trial, Point]:
    return Table(folder / "curves.csv", Trial, Point)


def _tell(trial: Trial, points: Sequence[Point]) -> None:
    error = final_error(list(points))
    print(f"{trial}: error {100 * error:.2f} %" + " (diverged)" * points[-1].diverged, flush=True)


EXPERIMENT = Staleness()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
