"""Communication: what backups cost in bytes and seconds, and whether 5 % more machines buy 5 % speed.

python -m experiments.communication run [--processes N]     in virtual time, without gradients
python -m experiments.communication run --quick --out DIR   the same path in seconds
python -m experiments.communication figures                 figures and tables from the committed results
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.communication.study import QUICK, Cost, Setting, Split, run_split, wanted


class Communication(Experiment):
    """Bytes and seconds by backups and layout; what more machines buy."""

    name = "communication"
    what = "What do backups cost in bytes and seconds, and do 5 % more machines buy 5 % speed?"
    takes = "one CPU core, some 5 minutes"

    def run(self, options: Options) -> bool:
        """All splits."""
        setting = QUICK if options.quick else Setting()
        return run_studies(options, Study(_table(options.out), lambda _: wanted(setting), run_split))

    def figures(self, folder: Path) -> list[Path]:
        """Everything from the table."""
        from experiments.communication.figures import draw_bought, draw_costs
        from experiments.communication.tables import text

        (found,) = read_all(self.name, folder, _table(folder))
        files = [folder / name for name in ("costs.png", "bought.png", "summary.md")]
        draw_costs(files[0], found)
        draw_bought(files[1], found)
        files[2].write_text(text(found))
        return files


def _table(folder: Path) -> Table[Split, Cost]:
    return Table(folder / "splits.csv", Split, Cost)


EXPERIMENT = Communication()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
