"""Policies head to head at equal machines: time to a target, final accuracy, updates, drops."""

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
from experiments.contest.racing import run
from experiments.contest.settings import Trial, all_trials, quick_trials


class Contest(Experiment):
    name = "contest"
    what = "Softsync, bounded staleness, k-batch, deadline, async in seven ways and backups, on the same machines."
    takes = "CPU, about 20 minutes of one core"

    def run(self, options: Options) -> bool:
        trials = quick_trials() if options.quick else all_trials()
        return run_studies(
            options, Study(_table(options.out), lambda _: trials, partial(run, quick=options.quick), _tell)
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.contest.figures import draw_all

        return draw_all(folder, *read_all(self.name, folder, _table(folder)))


def _table(folder: Path) -> Table[Trial, Finish]:
    return Table(folder / "races.csv", Trial, Finish)


def _tell(trial: Trial, rows: Sequence[Finish]) -> None:
    seconds = spread_of([row.seconds for row in finals(rows)])
    last = spread_of([row.measure for row in finals(rows)])
    print(
        f"{trial.machines} machines, {trial.latency}: {trial.method} at {finals(rows)[0].lr:g}: "
        f"{seconds.text()} s, ends at {last.text(1, 100)} %, {len(rows)} trainings",
        flush=True,
    )


EXPERIMENT = Contest()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
