"""Updates to a target against the quorum N and the backups b, beside theory; and how b should grow with N."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.trials import Table, run_trials
from experiments.rate.racing import Arrival, Run, run, timed
from experiments.rate.settings import Timed, Trial, all_timed, all_trials, quick_timed, quick_trials
from quorate.errors import BadInput

RACES, ARRIVALS = "races.csv", "arrivals.csv"


class Rate(Experiment):
    name = "rate"
    what = "Updates to a target over a grid of quorums and backups, beside theory; how many backups pay as N grows."
    takes = "CPU, about 4 minutes of one core"

    def run(self, options: Options) -> bool:
        until = time.monotonic() + options.limit_s
        trials = quick_trials() if options.quick else all_trials()
        clusters = quick_timed() if options.quick else all_timed()
        complete = run_trials(
            Table(options.out / ARRIVALS, Timed, Arrival),
            lambda _: clusters,
            timed,
            processes=options.processes,
            limit_s=options.limit_s,
            tell=lambda trial, _: print(f"arrivals of {trial.workers} workers, {trial.latency}", flush=True),
        )
        left_s = until - time.monotonic()
        if not complete or left_s <= 0:
            return False
        return run_trials(
            Table(options.out / RACES, Trial, Run),
            lambda _: trials,
            partial(run, quick=options.quick),
            processes=options.processes,
            limit_s=left_s,
            tell=_tell,
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.rate.figures import draw_all

        arrivals = Table(folder / ARRIVALS, Timed, Arrival).read()
        found = Table(folder / RACES, Trial, Run).read()
        if not found or not arrivals:
            raise BadInput(f"there are no races in {str(folder)!r} to draw; run the experiment first")
        return draw_all(folder, found, arrivals)


def _tell(trial: Trial, rows: Sequence[Run]) -> None:
    last = rows[-1]
    print(
        f"{trial.task}, noise {trial.noise:g}, quorum {trial.quorum}: {last.updates:.0f} updates at {last.lr:g}, "
        f"{len(rows)} trainings",
        flush=True,
    )


EXPERIMENT = Rate()

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
