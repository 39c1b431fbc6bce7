"""`quorate plan`: the recommended number of backups, with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorate.cli.options import OUTPUT, JsonOption, option
from quorate.cli.output import print_json, print_plan

GIVEN, TARGET = "What is known of the cluster", "What is known of the training"


def plan(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN|TIMES.csv",
            help="A run's folder or trace.jsonl; or step times (columns step, worker, seconds), as quorate.measure "
            "writes them in a DDP script.",
            show_default=False,
        ),
    ] = None,
    latency: Annotated[
        str | None,
        option(
            GIVEN,
            "Instead of a file: how long a ticket takes, e.g. chen2016 or shifted-exp:0.05,0.025*slow:3=4.",
            metavar="MODEL",
        ),
    ] = None,
    machines: Annotated[
        int | None, option(GIVEN, "How many machines there are.", show_default="those measured", metavar="N")
    ] = None,
    late: Annotated[
        str | None,
        option(
            GIVEN,
            "Late work is cancelled at once, or left to finish.",
            show_default="as in the trace",
            metavar="cancel|finish",
        ),
    ] = None,
    model_bytes: Annotated[
        int | None, option(GIVEN, "Size of the parameters.", show_default="the trace's", metavar="BYTES")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        option(
            GIVEN,
            "Plan again with a change: machines=200, without=3 (or 3+5), bandwidth=1Gbps; may be repeated.",
            metavar="CHANGE",
        ),
    ] = None,
    noise_scale: Annotated[
        float | None, option(TARGET, "Gradient noise scale in samples.", show_default="the trace's", metavar="SAMPLES")
    ] = None,
    batch_size: Annotated[
        int | None, option(TARGET, "Samples in a worker's batch.", show_default="the trace's", metavar="SAMPLES")
    ] = None,
    iterations: Annotated[
        str | None,
        option(
            TARGET,
            "Updates to the target where they are known, in thousands, by quorum: '50:137.5,100:76.2'.",
            metavar="N:THOUSANDS,…",
        ),
    ] = None,
    interval: Annotated[
        float, option(TARGET, "Half the width of the 95 % interval wanted, as a share of the mean.", metavar="SHARE")
    ] = 0.05,
    every: Annotated[bool, option(OUTPUT, "Show every split, not only the telling ones.", "--all")] = False,
    json: JsonOption = False,
) -> None:
    """Say how many backups to take: one recommendation, with its reason and when it would change.

    From the trace of a run, from step times of a DDP script, or from a description of the cluster.
    """
    from quorate.planning import plan as make_plan

    made = make_plan(
        *(sources or ()),
        latency=latency,
        machines=machines,
        noise_scale=noise_scale,
        iterations=iterations,
        batch_size=batch_size,
        model_bytes=model_bytes,
        late=late,
        interval=interval,
        what_if=what_if or (),
    )
    if json:
        print_json(made.as_dict())
    else:
        print_plan(made, every)
