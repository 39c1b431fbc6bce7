"""`quorate simulate`: one run in virtual time."""

from __future__ import annotations

from typing import Annotated

from quorate.cli._grouping import grouped
from quorate.cli._options import (
    POLICY,
    ClusterOptions,
    EndOptions,
    OutFolderOption,
    OutputOptions,
    PolicyOptions,
    SubjectOptions,
    UpdateOptions,
    option,
)
from quorate.cli._policies import choose_policy, label, parse_workers
from quorate.cli._progress import reporter
from quorate.cli._running import make_plan, torch_threads
from quorate.cli._show import print_json, print_summary


@grouped
def simulate(
    *,
    subject: SubjectOptions,
    cluster: ClusterOptions,
    policy: Annotated[
        str | None,
        option(
            POLICY,
            "backup, full-sync, async, softsync, bounded, k-batch, delayed or deadline.",
            show_default="backup for N+b, else full-sync",
            metavar="NAME",
        ),
    ] = None,
    options: PolicyOptions,
    end: EndOptions,
    update: UpdateOptions,
    output: OutputOptions,
    out: OutFolderOption = None,
) -> None:
    """Train a task on simulated workers, in virtual time.

    The gradients are real (or left out with --no-gradients); only the clock is not.
    """
    workers = parse_workers(cluster.workers)
    chosen = choose_policy(policy, workers, options.given())
    plan = make_plan(subject, cluster, end, update)
    name = label(chosen, workers.total)
    with torch_threads(output.threads), reporter(output.quiet) as report:
        result = plan.run(chosen, name, report, out=out, together=update.together)
    if output.json:
        print_json(result.summary)
    else:
        print_summary(result, name)
