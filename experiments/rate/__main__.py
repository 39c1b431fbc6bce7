"""Updates to a target against the quorum N and the backups b, beside theory; and how b should grow with N."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.common.command import Experiment, Options, main
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Table
from experiments.rate.racing import Arrival, Run, run, timed
from experiments.rate.settings import Timed, Trial, all_timed, all_trials, quick_timed, quick_trials


class Rate(Experiment):
    name = "rate"
    what = "Updates to a target over a grid of quorums and backups, beside theory; how many backups pay as N grows."
    takes = "CPU, about 4 minutes of one core"

    def run(self, options: Options) -> bool:
        trials = quick_trials() if options.quick else all_trials()
        clusters = quick_timed() if options.quick else all_timed()
        return run_studies(
            options,
            Study(_arrivals(options.out), lambda _: clusters, timed, _tell_timed),
            Study(_races(options.out), lambda _: trials, partial(run, quick=options.quick), _tell),
        )

    def figures(self, folder: Path) -> list[Path]:
        from experiments.rate.figures import draw_all

        return draw_all(folder, *read_all(self.name, folder, _races(folder), _arrivals(folder)))


def _races(folder: Path) -> Table[Trial, Run]:
    return Table(folder / "races.csv", Trial, Run)


def _arrivals(folder: Path) -> Table[Timed, Arrival]:
    return Table(folder / "arrivals.csv", Timed, Arrival)


def _tell_timed(trial: Timed, _: Sequence[Arrival]) -> None:
    print(f"arrivals of {trial.workers} workers, {trial.latency}", flush=True)


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
