"""What delay costs and what repairs it, on CIFAR-10."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.delay.rows import Row, Setting, final_accuracy
from experiments.delay.settings import QUICK_METHODS, wanted
from experiments.delay.training import train
from quorate.tasks.cifar10 import load_cifar10


class Delay(Experiment):
    name = "delay"
    what = "Two nets whose updates come 0, 1, 2 and 4 iterations late: what that costs in the end, and what repairs it."
    takes = "one GPU, 21 minutes"

    def run(self, options: Options) -> bool:
        if not options.quick:
            load_cifar10(options.data)  # fetched once, not by every process; and what is missing is said at once
        few = partial(wanted, methods=QUICK_METHODS, seeds=(1,), most_tried=4)
        training = partial(train, data=options.data, device=options.device, quick=options.quick)
        return run_studies(options, Study(_table(options.out), few if options.quick else wanted, training, _tell))

    def figures(self, folder: Path) -> list[Path]:
        from experiments.delay.figures import draw_all

        return draw_all(folder, *read_all(self.name, folder, _table(folder)))


def _table(folder: Path) -> Table[Setting, Row]:
    return Table(folder / "curves.csv", Setting, Row)


def _tell(setting: Setting, rows: Sequence[Row]) -> None:
    print(
        f"{setting.net} delay {setting.delay} {setting.repair} lr {setting.lr:g} seed {setting.seed}: "
        f"{final_accuracy(rows):.4f}",
        flush=True,
    )


EXPERIMENT = Delay()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
