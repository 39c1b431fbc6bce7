"""Lengths: does dropping late gradients starve long sequences, and does the ledger repair it?

python -m experiments.lengths run --data DIR            four real processes that share this machine's cores
python -m experiments.lengths run --quick --out DIR     the same path in seconds, without data
python -m experiments.lengths figures                   figure and tables from the committed results
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.lengths.settings import QUICK, OfLength, Setting, Training, wanted
from experiments.lengths.training import run
from quorate.tasks.charlm import load_shakespeare


class Lengths(Experiment):
    """Long sequences are late by nature: are they trained on as often as short ones?"""

    name = "lengths"
    what = "Does dropping late gradients starve long sequences, and does the ledger repair it?"
    takes = "two CPU cores, some 6 minutes"

    def run(self, options: Options) -> bool:
        """One training after the other, since step times decide who is late."""
        if not options.quick:
            load_shakespeare(options.data)  # what is missing is said at once
        setting = QUICK if options.quick else Setting()
        train = partial(run, data=options.data, quick=options.quick)
        return run_studies(options, Study(_table(options.out), lambda _: wanted(setting), train, one_by_one=True))

    def figures(self, folder: Path) -> list[Path]:
        """Both from the table."""
        from experiments.lengths.tables import draw, text

        (found,) = read_all(self.name, folder, _table(folder))
        files = [folder / "lengths.png", folder / "summary.md"]
        draw(files[0], found)
        files[1].write_text(text(found))
        return files


def _table(folder: Path) -> Table[Training, OfLength]:
    return Table(folder / "lengths.csv", Training, OfLength)


EXPERIMENT = Lengths()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
