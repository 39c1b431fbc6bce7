"""`quorate simulate`: one run in virtual time."""

from __future__ import annotations

from quorate.cli.engine_options import SimulatedPlace
from quorate.cli.options import (
    ClusterOptions,
    EndOptions,
    OutFolderOption,
    OutputOptions,
    PolicyOption,
    PolicyOptions,
    SubjectOptions,
    ThreadsOption,
    UpdateOptions,
    grouped,
)
from quorate.cli.output import print_result
from quorate.cli.policy_options import choose_policy, label, parse_workers
from quorate.cli.progress import reporter
from quorate.cli.run_command import make_run_spec, run_environment


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
    chosen = choose_policy(policy, workers, options.given(), options.policy_option or ())
    place = SimulatedPlace(
        latency=cluster.latency,
        network=cluster.network,
        faults=cluster.faults,
        device=update.device,
        together=update.together,
    )
    spec = make_run_spec(subject, workers, place, cluster.patience, end, update)
    name = label(chosen, workers.total)
    with run_environment(threads), reporter(output.quiet) as report:
        result = spec.run(chosen, name, report, out=out)
    print_result(result, name, output.json)
