"""When async wins: which policy reaches the target first, over tail, unevenness and noise, and by how much."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.spread import spread_of
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.to_target import Finish, finals
from experiments.common.trials import Table
from experiments.frontier.racing import run
from experiments.frontier.settings import Trial, all_trials, quick_trials


class Frontier(Experiment):
    name = "frontier"
    what = "A map over tail weight, lasting unevenness and noise: which policy reaches the target first, by how much."
    takes = "CPU, about 15 minutes of one core"

    def run(self, options: Options) -> bool:
        trials = quick_trials() if options.quick else all_trials()
        return run_studies(
            options, Study(_table(options.out), lambda _: trials, partial(run, quick=options.quick), _tell)
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.frontier.figures import draw_all

        return draw_all(folder, *read_all(self.name, folder, _table(folder)))


def _table(folder: Path) -> Table[Trial, Finish]:
    return Table(folder / "races.csv", Trial, Finish)


def _tell(trial: Trial, rows: Sequence[Finish]) -> None:
    seconds = spread_of([row.seconds for row in finals(rows)])
    where = f"{trial.task}, tail {trial.tail:g}, spread {trial.spread:g}, noise {trial.noise:g}"
    print(f"{where}: {trial.family} {trial.option}: {seconds.text()} s, {len(rows)} trainings", flush=True)


EXPERIMENT = Frontier()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
