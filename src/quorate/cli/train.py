"""`quorate train`: starts or resumes a run on real workers, local or on Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.engine_options import LOCAL, RAY, check_engine, place_of_real_workers
from quorate.cli.options import (
    KEPT,
    EndOptions,
    LearningOptions,
    OutputOptions,
    PolicyOption,
    PolicyOptions,
    ProcessOptions,
    TaskOptions,
    grouped,
    option,
)
from quorate.cli.output import print_result
from quorate.cli.policy_options import choose_policy, label, parse_workers
from quorate.cli.progress import reporter
from quorate.cli.ray_options import RayOptions
from quorate.cli.resume_command import check_options_can_start, given_options, resume_run
from quorate.cli.run_command import folder_for_run, make_run_spec, run_environment
from quorate.trace import holds_nothing


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
            KEPT,
            "A new folder for what is recorded.",
            show_default="the next of runs/001, runs/002 …",
            metavar="FOLDER",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        option(KEPT, "Updates between checkpoints; a signal leaves one in any case.", show_default="once a minute"),
    ] = None,
    resume: Annotated[
        Path | None,
        option(KEPT, "Go on with the run in this folder, as it was recorded; an end may be new.", metavar="RUN"),
    ] = None,
    output: OutputOptions,
) -> None:
    """Train a task on worker processes of this machine, or on a Ray cluster.

    Ctrl-C and SIGTERM end it after the update under way (or after 5 s), with a checkpoint and the command to go on.
    A second Ctrl-C ends it at once.
    """
    check_engine(cluster.engine, (LOCAL, RAY))
    given = given_options(context)
    if resume is not None and holds_nothing(resume):
        from quorate.out_folder import take_old_trace_back  # imports torch

        take_old_trace_back(resume)
    if resume is not None and holds_nothing(resume):
        check_options_can_start(resume, given)
        out, resume = resume, None
    if resume is not None:
        result, name = resume_run(resume, given, on_ray, end, cluster.patience, checkpoint_every, output.quiet)
    else:
        workers = parse_workers(cluster.workers or str(len(os.sched_getaffinity(0))))
        chosen = choose_policy(policy, workers, options.given(), options.policy_option or ())
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
        spec = make_run_spec(subject, workers, place, cluster.patience, end, update)
        with run_environment(cluster.threads), folder_for_run(out) as folder, reporter(output.quiet) as report:
            result = spec.run(chosen, name, report, out=folder, checkpoint_every=checkpoint_every)
    print_result(result, name, output.json, out=str(result.out))
