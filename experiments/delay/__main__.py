"""What delay costs and what repairs it, on CIFAR-10."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.delay import held_out, tiny_imagenet
from experiments.delay.held_out import DATA_SETS
from experiments.delay.rows import Row, Setting, final_accuracy
from experiments.delay.settings import QUICK_METHODS, wanted
from experiments.delay.training import train, train_held_out
from quorate.tasks.cifar10 import load_cifar10


class Delay(Experiment):
    name = "delay"
    what = "Two nets whose updates come 0, 1, 2 and 4 iterations late: what that costs in the end, and what repairs it."
    takes = "one GPU, 21 minutes; the second protocol, as estimated, 46 more"

    def run(self, options: Options) -> bool:
        if not options.quick:
            load_cifar10(options.data)  # fetched once, not by every process; and what is missing is said at once
        few = partial(wanted, methods=QUICK_METHODS, seeds=(1,), most_tried=4)
        given = {"data": options.data, "device": options.device, "quick": options.quick}
        second = partial(
            held_out.wanted,
            plan=held_out.QUICK_PLAN if options.quick else held_out.FULL_PLAN,
            data_sets=tuple(DATA_SETS) if options.quick else _data_sets(options.data),
        )
        return run_studies(
            options,
            Study(_table(options.out), few if options.quick else wanted, partial(train, **given), _tell),
            Study(_held_out_table(options.out), second, partial(train_held_out, **given), _tell_held_out),
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.delay.figures import draw_all

        return draw_all(folder, *read_all(self.name, folder, _table(folder)), _held_out_table(folder).read())


def _table(folder: Path) -> Table[Setting, Row]:
    return Table(folder / "curves.csv", Setting, Row)


def _held_out_table(folder: Path) -> Table[held_out.Trial, Row]:
    return Table(folder / "held-out.csv", held_out.Trial, Row)


def _data_sets(data: Path | None) -> list[str]:
    """Those that are there. The second one cannot be fetched; without it its trainings are left out."""
    file = tiny_imagenet.file_of(data)
    if file.is_file():
        tiny_imagenet.load(data)  # what cannot be read is said at once
        return list(DATA_SETS)
    print(
        f"{str(file)!r} is missing, so the trainings with {tiny_imagenet.NAME} are skipped; "
        "make it with: python -m experiments.delay.tiny_imagenet FROM DIR",
        flush=True,
    )
    return [name for name in DATA_SETS if name != tiny_imagenet.NAME]


def _tell(setting: Setting, rows: Sequence[Row]) -> None:
    print(
        f"{setting.net} delay {setting.delay} {setting.repair} lr {setting.lr:g} seed {setting.seed}: "
        f"{final_accuracy(rows):.4f}",
        flush=True,
    )


def _tell_held_out(trial: held_out.Trial, rows: Sequence[Row]) -> None:
    print(
        f"{trial.data} {trial.net} delay {trial.delay} {trial.repair} lr {trial.lr:g} clip {trial.clip:g} "
        f"seed {trial.seed}: {final_accuracy(rows, trial.guessing):.4f} {'held out' if trial.tuning else 'test'}",
        flush=True,
    )


EXPERIMENT = Delay()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
