"""`quorate train` and `quorate simulate`: start a run, in real or in virtual time, or resume a recorded one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quorate.cli.engine_options import UNRECORDED, RayOptions, choose_place, parse_resources, resources_text
from quorate.cli.options import (
    KEPT,
    RAY,
    SIMULATED,
    ClusterOptions,
    EndOptions,
    EngineOptions,
    OutputOptions,
    PolicyOption,
    PolicyOptions,
    TaskOptions,
    UpdateOptions,
    grouped,
    option,
    out_option,
)
from quorate.cli.output import print_result
from quorate.cli.policy_options import (
    WorkerCounts,
    choose_policy,
    flag_text,
    label,
    parse_own_options,
    parse_workers,
)
from quorate.cli.progress import AliveWorkers, reporter, starting
from quorate.cli.run_command import folder_for_run, make_run_spec, resume_hint, run_environment
from quorate.errors import BadInput
from quorate.faults import parse_faults
from quorate.latency import parse_latency
from quorate.trace import TRACE_FILE, holds_nothing, read_whole_header
from quorate.user_code import recorded_policy

if TYPE_CHECKING:
    from quorate.run import Result

SIMULATED_WORKERS = "8"


@grouped
def train(
    context: typer.Context,
    *,
    subject: TaskOptions,
    engine: EngineOptions,
    cluster: ClusterOptions,
    on_ray: RayOptions,
    policy: PolicyOption = None,
    options: PolicyOptions,
    end: EndOptions,
    update: UpdateOptions,
    out: Annotated[Path | None, out_option("the next of runs/001, runs/002 …; nothing is saved if simulated")] = None,
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
    """Train a task on worker processes of this machine, on a Ray cluster, or on simulated workers.

    Ctrl-C and SIGTERM end it after the update under way (or after 5 s), with a checkpoint and the command to go on.
    A second Ctrl-C ends it at once. --engine simulated does the same as quorate simulate, which keeps no
    checkpoints.
    """
    given = given_options(context)
    if resume is not None and holds_nothing(resume):
        from quorate.out_folder import take_old_trace_back  # imports torch

        take_old_trace_back(resume)
    if resume is not None and holds_nothing(resume):
        check_options_can_start(resume, given)
        out, resume = resume, None
    if resume is not None:
        result, name = resume_run(resume, given, on_ray, end, cluster.patience, checkpoint_every, output.quiet)
        print_result(result, name, output.json)
    else:
        start_run(subject, engine, cluster, on_ray, policy, options, end, update, out, checkpoint_every, output)


@grouped
def simulate(
    *,
    subject: TaskOptions,
    cluster: ClusterOptions,
    policy: PolicyOption = None,
    options: PolicyOptions,
    end: EndOptions,
    update: UpdateOptions,
    out: Annotated[Path | None, out_option("nothing is saved")] = None,
    output: OutputOptions,
) -> None:
    """Train a task on simulated workers, in virtual time: the same as quorate train --engine simulated.

    The gradients are real (or left out with --no-gradients); only the clock is not.
    """
    engine = EngineOptions(engine=SIMULATED)
    start_run(subject, engine, cluster, RayOptions(), policy, options, end, update, out, None, output)


def start_run(
    subject: TaskOptions,
    engine: EngineOptions,
    cluster: ClusterOptions,
    on_ray: RayOptions,
    policy: str | None,
    options: PolicyOptions,
    end: EndOptions,
    update: UpdateOptions,
    out: Path | None,
    checkpoint_every: int | None,
    output: OutputOptions,
) -> None:
    """Make a new run and print its result. A real run has a folder even if none is given, for its checkpoints."""
    place = choose_place(engine, cluster, on_ray, subject, update)
    usual = str(len(os.sched_getaffinity(0))) if place.real else SIMULATED_WORKERS
    workers = parse_workers(cluster.workers or usual)
    chosen = choose_policy(policy, workers, options.given(), options.policy_option or ())
    name = label(chosen, workers.total)
    spec = make_run_spec(subject, workers.total, place, cluster.patience, end, update)
    kept = folder_for_run(out) if place.real else nullcontext(out)
    with run_environment(cluster.threads), kept as folder, reporter(output.quiet) as report:
        result = spec.run(chosen, name, report, out=folder, checkpoint_every=checkpoint_every)
    print_result(result, name, output.json)


# ---------------------------------------------------------------- resuming

#: Options that may differ each time, so that they contradict nothing recorded.
ALWAYS_ALLOWED = ("resume", "task", "updates", "epochs", "until", "checkpoint_every", "patience", "quiet", "json")
_ENGINE_OPTIONS = ("threads", "device", "latency", "faults", "wire", "shards", "cpus", "gpus")


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options on the command line, with their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: context.params[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def check_options_can_start(run: Path, given: dict[str, Any]) -> None:
    """Nothing is recorded to resume from: refuse unless the options are enough to start the run."""
    from quorate.out_folder import OutFolder

    trace = run / TRACE_FILE
    found = "is empty: its run was killed before it recorded anything" if trace.exists() else "does not exist"
    if "out" in given and given["out"].resolve() != run.resolve():
        raise BadInput(f"--out {given['out']} was given with --resume {run}; name one folder")
    if not given.keys() - {"resume", "out", "patience", "quiet", "json"}:
        raise BadInput(
            f"trace {str(trace)!r} {found}; to start the run, add the options that it was started with (--task …)"
        )
    OutFolder(run)  # refuses a folder that holds other files of a run
    sys.stderr.write(f"note: trace {str(trace)!r} {found}; the run starts\n")


def resume_run(
    run: Path,
    given: dict[str, Any],
    on_ray: RayOptions,
    end: EndOptions,
    patience: float,
    checkpoint_every: int | None,
    quiet: bool,
) -> tuple[Result, str]:
    """Resume a run as it was recorded; returns its result and its label."""
    import quorate
    from quorate.training import engine_of

    header = read_whole_header(run)
    policy = given.get("policy") if ":" in given.get("policy", "") else None
    with redirect_stdout(sys.stderr):
        name = label(recorded_policy(header["policy"], policy), header["workers"])
    check_agrees(run, header, given)
    again = on_ray.unrecorded_arguments()
    # As many threads as in the workers: a replay evaluates with that number, and must get the same bits.
    with (
        run_environment(header["engine"].get("threads", 1)),
        reporter(quiet) as report,
        resume_hint(name, report, run, on_ray.options_to_repeat()),
    ):
        report.begin(name, starting(header["workers"], header["engine"]["name"]))
        result = quorate.resume(
            run,
            given.get("task"),
            engine_of(header["engine"], header["workers"], **again) if again else None,
            policy=policy,
            updates=end.updates,
            epochs=end.epochs,
            until=end.until,
            patience_s=patience,
            checkpoint_every=checkpoint_every,
            on_progress=report,
            recorders=(AliveWorkers(report),),
        )
    return result, name


def check_agrees(run: Path, header: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse options that contradict the recorded run; options that repeat it are fine."""
    recorded = _recorded(run, header)
    free = (*ALWAYS_ALLOWED, *UNRECORDED) if header["engine"]["name"] == RAY else ALWAYS_ALLOWED
    given = {**given, **parse_own_options(given.get("policy_option") or ())}
    given.pop("policy_option", None)
    for name, value in given.items():
        if name in UNRECORDED and name not in free:
            raise BadInput(
                f"{flag_text(name, value)} was given, but the run in {str(run)!r} was not made on Ray; leave it out"
            )
        if name in free or _same(name, value, recorded.get(name), "backups" in header["policy"]):
            continue
        there = recorded.get(name)
        made = f"without --{name.replace('_', '-')}" if there is None else f"with {flag_text(name, there)}"
        raise BadInput(
            f"{flag_text(name, value)} was given, but the run in {str(run)!r} was made {made}; "
            f"leave it out, or start a new run"
        )


def _recorded(run: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Every option of `quorate train` with its value in the recorded run; None if it was not used."""
    engine, policy = header["engine"], header["policy"]
    quorum, workers = policy.get("quorum"), header["workers"]
    by_workers = ("quorum", "backups") if "backups" in policy else ()  # `--workers N+b` says both
    return {
        **{name: value for name, value in policy.items() if name not in ("name", *by_workers)},
        **header["learning"],
        **{name: engine.get(name) for name in _ENGINE_OPTIONS},
        "resources": resources_text(engine.get("resources", {})),
        "engine": engine["name"],
        **{name: header[name] for name in ("batch_size", "seed", "evaluate_every")},
        "policy": policy["name"],
        "workers": str(workers) if quorum is None or quorum >= workers else f"{quorum}+{workers - quorum}",
        "out": str(run),
    }


def _same(name: str, given: Any, recorded: Any, has_backups: bool) -> bool:
    """Whether two values of an option mean the same."""
    if name == "policy" and ":" in given:  # the current place of the class; loading it compares the names
        return True
    if name == "workers":
        return _same_workers(parse_workers(given), parse_workers(recorded), has_backups)
    read: dict[str, Callable[[str], Any]] = {
        "latency": lambda text: parse_latency(text).text(),
        "faults": parse_faults,
        "resources": lambda text: parse_resources("resources", text),
        "out": lambda text: Path(text).resolve(),
    }
    if recorded is not None and name in read:
        return bool(read[name](given) == read[name](recorded))
    return bool(given == recorded)


def _same_workers(given: WorkerCounts, recorded: WorkerCounts, has_backups: bool) -> bool:
    """A plain number of workers states the quorum only for a policy with backups."""
    if not given.backups and not has_backups:
        return given.total == recorded.total
    return given == recorded
