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
from experiments.common.trials import Table, run_trials
from experiments.staleness.settings import FULL, QUICK, Trial, final_error, wanted
from experiments.staleness.training import train
from quorate.errors import BadInput
from quorate.tasks.mnist import load_mnist

CURVES = "curves.csv"


class Staleness(Experiment):
    name = "staleness"
    what = "Test error of a small net on MNIST whose gradients are all used 0 to 125 updates late, and what repairs it."
    takes = "one GPU, minutes"

    def run(self, options: Options) -> bool:
        if not options.quick:
            load_mnist(options.data)  # fetched once, not by every process; and what is missing is said at once
        return run_trials(
            Table(options.out / CURVES, Trial, Point),
            partial(wanted, length=QUICK if options.quick else FULL),
            partial(train, data=options.data, device=options.device, quick=options.quick),
            processes=options.processes,
            limit_s=options.limit_s,
            tell=_tell,
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.staleness.figures import draw_all

        found = Table(folder / CURVES, Trial, Point).read()
        if not found:
            raise BadInput(f"there are no curves in {str(folder)!r}; run first: python -m experiments.staleness run")
        is_full = {trial.epochs for trial in found} <= {FULL.epochs, FULL.tuning_epochs}
        return draw_all(folder, found, FULL if is_full else QUICK)


def _tell(trial: Trial, points: Sequence[Point]) -> None:
    error = final_error(list(points))
    print(f"{trial}: error {100 * error:.2f} %" + " (diverged)" * points[-1].diverged, flush=True)


EXPERIMENT = Staleness()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
