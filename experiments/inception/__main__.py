"""Inception on CIFAR-10: sync with backups beside async, test precision and hours, and the initial learning rate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.curves import Point
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.inception.settings import FULL, QUICK, Trial, final_accuracy, wanted
from experiments.inception.timing import Seconds, Split, seconds_a_round, splits
from experiments.inception.training import train
from quorate.tasks.cifar10 import load_cifar10


class Inception(Experiment):
    name = "inception"
    what = "Sync with 50+3, 100+6 and 200+12 workers beside async with as many: test precision and hours."
    takes = "one GPU, some 20 minutes"

    def run(self, options: Options) -> bool:
        if not options.quick:
            load_cifar10(options.data)  # fetched once, not by every process; and what is missing is said at once
        training = partial(train, data=options.data, device=options.device, quick=options.quick)
        length = QUICK if options.quick else FULL
        curves, rounds = _tables(options.out)
        return run_studies(
            options,
            Study(rounds, partial(splits, length=length), seconds_a_round),
            Study(curves, partial(wanted, length=length), training, _tell),
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.inception.figures import draw_all

        return draw_all(folder, *read_all(self.name, folder, *_tables(folder)))


def _tables(folder: Path) -> tuple[Table[Trial, Point], Table[Split, Seconds]]:
    return Table(folder / "curves.csv", Trial, Point), Table(folder / "rounds.csv", Split, Seconds)


def _tell(trial: Trial, points: Sequence[Point]) -> None:
    print(f"{trial.name} lr {trial.lr:g} seed {trial.seed}: {final_accuracy(list(points)):.4f}", flush=True)


EXPERIMENT = Inception()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
