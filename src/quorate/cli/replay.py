"""`quorate replay`: run a recorded trace again and compare every decision and parameter."""

from __future__ import annotations

from typing import Annotated

import typer

from quorate.cli.options import POLICY, SUBJECT, UPDATE, JsonOption, RunArgument, option, threads_option
from quorate.cli.output import print_json
from quorate.cli.run_command import run_environment
from quorate.cli.signals import INTERRUPTED, Stopped


def replay(
    run: RunArgument,
    task: Annotated[
        str | None,
        option(SUBJECT, "The task, where it has moved.", show_default="the recorded one", metavar="TASK"),
    ] = None,
    policy: Annotated[
        str | None,
        option(
            POLICY,
            "Where the class of a policy of your own is, if it has moved.",
            show_default="the recorded one",
            metavar="NAME",
        ),
    ] = None,
    no_gradients: Annotated[
        bool, option(SUBJECT, "Compare the decisions only, not the parameters.", "--no-gradients")
    ] = False,
    device: Annotated[
        str | None, option(UPDATE, "Where to compute.", show_default="the recorded one", metavar="DEVICE")
    ] = None,
    threads: Annotated[int, threads_option("Threads of torch; take those of the run.")] = 1,
    json: JsonOption = False,
) -> None:
    """Run a trace again: every decision must be made again, and every parameter come out bit for bit.

    Exit status 1 and the first difference where they are not.
    """
    import quorate

    try:
        with run_environment(threads):
            done = quorate.replay(run, task, policy=policy, gradients=False if no_gradients else None, device=device)
    except KeyboardInterrupt:
        raise Stopped("stopped the replay; what was compared until then agreed", INTERRUPTED) from None
    digest = done.result.digest
    if json:
        print_json(
            {
                "agreed": True,
                "records": done.lines,
                "gradients": done.gradients,
                "updates": done.result.metrics.updates,
                "digest": digest,
            }
        )
        return
    learned = (
        f"and so did every loss, every measure and the final parameters, bit for bit (digest {digest})"
        if done.gradients
        else "gradients were not computed, so losses and parameters were not compared"
    )
    sign = "," if done.gradients else ";"
    typer.echo(
        f"Replayed {done.lines:,} records of {str(run)!r}, {done.result.metrics.updates:,} updates: "
        f"every decision agreed{sign} {learned}."
    )
