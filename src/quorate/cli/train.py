"""`quorate train`: one run on real workers, here or on Ray, or the rest of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli._engines import LOCAL, RAY, check_engine, place_of_real_workers
from quorate.cli._folders import folder_for_run
from quorate.cli._grouping import grouped
from quorate.cli._options import (
    KEPT,
    EndOptions,
    LearningOptions,
    OutputOptions,
    PolicyOption,
    PolicyOptions,
    ProcessOptions,
    TaskOptions,
    option,
)
from quorate.cli._policies import choose_policy, label, parse_workers
from quorate.cli._progress import reporter
from quorate.cli._ray_options import RayOptions
from quorate.cli._resuming import given_options, go_on
from quorate.cli._running import at_work, make_plan
from quorate.cli._show import print_json, print_summary


@grouped
def train(
    context: typer.Context,
    *,
    subject: TaskOptions,
    cluster: ProcessOptions,
    on_ray: RayOptions,
    policy: PolicyOption = None,
    options: PolicyOptions,
    end: EndOptions,
    update: LearningOptions,
    out: Annotated[
        Path | None,
        option(
            KEPT, "A new folder for what is recorded.", show_default="the next of runs/001, runs/002 …", metavar="DIR"
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, option(KEPT, "Updates between checkpoints; a signal leaves one in any case.", show_default="none")
    ] = None,
    resume: Annotated[
        Path | None,
        option(KEPT, "Go on with the run in this folder, as it was recorded; an end may be new.", metavar="RUN"),
    ] = None,
    output: OutputOptions,
) -> None:
    """Train a task on worker processes of this machine, or on a Ray cluster.

    Ctrl-C and SIGTERM end it after the update under way, with a checkpoint and the command to go on.
    A second Ctrl-C ends it at once.
    """
    check_engine(cluster.engine, (LOCAL, RAY))
    if resume is not None:
        given = given_options(context)
        result, name = go_on(resume, given, on_ray, end, cluster.patience, checkpoint_every, output.quiet)
    else:
        workers = parse_workers(cluster.workers or str(len(os.sched_getaffinity(0))))
        chosen = choose_policy(policy, workers, options.given())
        name = label(chosen, workers.total)
        place = place_of_real_workers(
            cluster.engine,
            on_ray,
            threads=cluster.threads,
            device=cluster.device,
            latency=cluster.latency,
            faults=cluster.faults,
            wire=cluster.wire,
        )
        plan = make_plan(subject, workers, place, cluster.patience, end, update)
        with at_work(cluster.threads), folder_for_run(out) as folder, reporter(output.quiet) as report:
            result = plan.run(chosen, name, report, out=folder, checkpoint_every=checkpoint_every)
    if output.json:
        print_json({**result.summary, "out": str(result.out)})
    else:
        print_summary(result, name)
