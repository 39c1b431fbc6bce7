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
from experiments.contest.shared import SEEDS, Shared, run_shared, shared_trials


class Contest(Experiment):
    name = "contest"
    what = "Softsync, bounded staleness, k-batch, deadline, async in seven ways and backups, on the same machines."
    takes = "CPU, about 20 minutes of one core"

    def run(self, options: Options) -> bool:
        trials = quick_trials() if options.quick else all_trials()
        shared = list(shared_trials(options.quick))
        return run_studies(
            options,
            Study(_table(options.out), lambda _: trials, partial(run, quick=options.quick), _tell),
            Study(_shared_table(options.out), lambda _: shared, run_shared, _tell_shared),
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.contest.figures import draw_all

        return draw_all(folder, *read_all(self.name, folder, _table(folder), _shared_table(folder)))


def _table(folder: Path) -> Table[Trial, Finish]:
    return Table(folder / "races.csv", Trial, Finish)


def _shared_table(folder: Path) -> Table[Shared, Finish]:
    return Table(folder / "shared.csv", Shared, Finish)


def _tell_shared(trial: Shared, rows: Sequence[Finish]) -> None:
    """A line for every last seed: there are 1,500 trainings."""
    if trial.seed == SEEDS[-1]:
        print(f"{trial.latency}: {trial.backups} backups at {trial.lr:g}: {rows[0].seconds:.1f} s", flush=True)


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
