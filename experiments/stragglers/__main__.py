"""Stragglers: when the k-th gradient comes, and how many backups that is worth.

python -m experiments.stragglers run [--processes N]     in virtual time, then on real processes of this machine
python -m experiments.stragglers run --quick --out DIR   the same path in seconds
python -m experiments.stragglers figures                 figures and tables from the committed results
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.stragglers import measured, simulated
from experiments.stragglers.measured import Processes, run_processes
from experiments.stragglers.simulated import Arrival, Rounds, run_rounds


class Stragglers(Experiment):
    """The k-th arrival, published, simulated and measured; and what other tails would have it be."""

    name = "stragglers"
    what = "When does the k-th gradient of a round come, and how many backups is that worth?"
    takes = "one CPU core, some 20 minutes, most of them with real processes"

    def run(self, options: Options) -> bool:
        """Virtual time first, as many at once as asked for; then real processes, one run after the other."""
        rounds, processes = (
            (simulated.QUICK, measured.QUICK) if options.quick else (simulated.Setting(), measured.Setting())
        )
        return run_studies(
            options,
            Study(_simulated(options.out), lambda _: simulated.wanted(rounds), run_rounds),
            Study(_measured(options.out), lambda _: measured.wanted(processes), run_processes, one_by_one=True),
        )

    def figures(self, folder: Path) -> list[Path]:
        """Everything from the two tables."""
        from experiments.stragglers.figures import draw_arrivals, draw_choice, draw_measured, draw_tails
        from experiments.stragglers.tables import text

        found, processes = read_all(self.name, folder, _simulated(folder), _measured(folder))
        files = [folder / name for name in ("arrivals.png", "choice.png", "tails.png", "measured.png", "summary.md")]
        draw_arrivals(files[0], found)
        draw_choice(files[1], found)
        draw_tails(files[2], found)
        draw_measured(files[3], processes)
        files[4].write_text(text(found, processes))
        return files


def _simulated(folder: Path) -> Table[Rounds, Arrival]:
    return Table(folder / "simulated.csv", Rounds, Arrival)


def _measured(folder: Path) -> Table[Processes, Arrival]:
    return Table(folder / "measured.csv", Processes, Arrival)


EXPERIMENT = Stragglers()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
