"""Policies head to head at equal machines: time to a target, final accuracy, updates, drops."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.spread import spread_of
from experiments.common.to_target import Finish, finals
from experiments.common.trials import Table, run_trials
from experiments.contest.racing import run
from experiments.contest.settings import Trial, all_trials, quick_trials
from quorate.errors import BadInput

RACES = "races.csv"


class Contest(Experiment):
    name = "contest"
    what = "Softsync, bounded staleness, k-batch, deadline, async in seven ways and backups, on the same machines."
    takes = "CPU, about 20 minutes of one core"

    def run(self, options: Options) -> bool:
        trials = quick_trials() if options.quick else all_trials()
        return run_trials(
            Table(options.out / RACES, Trial, Finish),
            lambda _: trials,
            partial(run, quick=options.quick),
            processes=options.processes,
            limit_s=options.limit_s,
            tell=_tell,
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.contest.figures import draw_all

        found = Table(folder / RACES, Trial, Finish).read()
        if not found:
            raise BadInput(f"there are no races in {str(folder)!r} to draw; run the experiment first")
        return draw_all(folder, found)


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
