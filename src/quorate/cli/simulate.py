"""`quorate simulate`: one run in virtual time."""

from __future__ import annotations

from quorate.cli._engines import Simulation
from quorate.cli._grouping import grouped
from quorate.cli._options import (
    ClusterOptions,
    EndOptions,
    OutFolderOption,
    OutputOptions,
    PolicyOption,
    PolicyOptions,
    SubjectOptions,
    ThreadsOption,
    UpdateOptions,
)
from quorate.cli._policies import choose_policy, label, parse_workers
from quorate.cli._progress import reporter
from quorate.cli._running import at_work, make_plan
from quorate.cli._show import print_json, print_summary


@grouped
def simulate(
    *,
    subject: SubjectOptions,
    cluster: ClusterOptions,
    policy: PolicyOption = None,
    options: PolicyOptions,
    end: EndOptions,
    update: UpdateOptions,
    output: OutputOptions,
    threads: ThreadsOption = 1,
    out: OutFolderOption = None,
) -> None:
    """Train a task on simulated workers, in virtual time.

    The gradients are real (or left out with --no-gradients); only the clock is not.
    """
    workers = parse_workers(cluster.workers)
    chosen = choose_policy(policy, workers, options.given())
    place = Simulation(
        latency=cluster.latency,
        network=cluster.network,
        faults=cluster.faults,
        device=update.device,
        together=update.together,
    )
    plan = make_plan(subject, workers, place, cluster.patience, end, update)
    name = label(chosen, workers.total)
    with at_work(threads), reporter(output.quiet) as report:
        result = plan.run(chosen, name, report, out=out)
    if output.json:
        print_json(result.summary)
    else:
        print_summary(result, name)
