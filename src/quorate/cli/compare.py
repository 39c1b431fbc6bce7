"""`quorate compare`: several policies on one task, with the same seed and equally slow workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from quorate.cli._comparing import FIGURE_FILE, ComparisonFolder, Contender, run_all
from quorate.cli._engines import LOCAL, RAY, SIMULATED, Place, Simulation, check_engine, place_of_real_workers
from quorate.cli._grouping import grouped
from quorate.cli._options import (
    CLUSTER,
    DEFAULT_LATENCY,
    END,
    POLICY,
    EndOptions,
    FigureOption,
    OutFolderOption,
    OutputOptions,
    PolicyOptions,
    SubjectOptions,
    ThreadsOption,
    UpdateOptions,
    WorkersOption,
    network_option,
    option,
    together_option,
    wire_option,
)
from quorate.cli._policies import choose_policies, label, parse_workers, shown
from quorate.cli._progress import reporter
from quorate.cli._ray_options import RayOptions
from quorate.cli._running import at_work, make_plan
from quorate.cli._show import print_json
from quorate.cli._table import print_table
from quorate.errors import BadInput
from quorate.policies import Policy

ENGINES = (LOCAL, RAY, SIMULATED)
#: A tenth of what is simulated: these seconds are waited for.
DEFAULT_DELAYS = "pause:0.005,0.05,10"
DEFAULT_POLICIES = "full-sync,backup,async,softsync"
DIGITS_TARGET = "accuracy>=0.95"


@dataclass(frozen=True, kw_only=True)
class ComparedCluster:
    """The same cluster for all, with backups for those that use them."""

    engine: Annotated[
        str,
        option(
            CLUSTER,
            "Where it runs: on worker processes of this machine, on Ray, or simulated.",
            metavar="local|ray|simulated",
        ),
    ] = "local"
    workers: WorkersOption = "6+2"
    latency: Annotated[
        str | None,
        option(
            CLUSTER,
            "How long a simulated ticket takes, or how long a real one is held back; e.g. constant:0.05, "
            "shifted-exp:0.05,0.025, chen2016, lognormal:0.05,0.4*slow:3=4.",
            show_default=f"{DEFAULT_DELAYS} local, none on Ray, {DEFAULT_LATENCY} simulated",
            metavar="MODEL",
        ),
    ] = None
    wire: Annotated[str | None, wire_option(" (local, ray)")] = None
    network: Annotated[str | None, network_option(" (simulated)")] = None
    faults: Annotated[
        str | None,
        option(
            CLUSTER,
            "Workers that go, e.g. 'lose:3@2'; real ones come back by themselves, simulated ones with join:3@25.",
            show_default="none",
            metavar="SCRIPT",
        ),
    ] = None
    patience: Annotated[float, option(CLUSTER, "Seconds to wait for workers when too few are alive.")] = 600.0


@dataclass(frozen=True, kw_only=True)
class ComparedUpdate(UpdateOptions):
    """The update of either engine."""

    together: Annotated[bool | None, together_option(" (simulated)")] = None


@dataclass(frozen=True, kw_only=True)
class ComparedEnd(EndOptions):
    """Long enough for the digits to be learned, so that there is something to compare."""

    epochs: Annotated[int | None, option(END, "End after so many epochs.", show_default="otherwise 20")] = None
    default_epochs: ClassVar[int] = 20


@grouped
def compare(
    *,
    subject: SubjectOptions,
    cluster: ComparedCluster,
    on_ray: RayOptions,
    policies: Annotated[
        str, option(POLICY, "What to compare; speed-ups are against the first.", metavar="NAME,NAME,…")
    ] = DEFAULT_POLICIES,
    options: PolicyOptions,
    end: ComparedEnd,
    target: Annotated[
        str | None,
        option(
            END,
            "Measure the time to this, e.g. 'accuracy>=0.95'; runs do not stop at it.",
            show_default=f"{DIGITS_TARGET} for digits",
            metavar="CONDITION",
        ),
    ] = None,
    update: ComparedUpdate,
    output: OutputOptions,
    threads: ThreadsOption = 1,
    out: OutFolderOption = None,
    figure: FigureOption = None,
) -> int:
    """Train a task under several policies and show what each comes to.

    All meet the same data and equally slow workers. Options of single policies go to those that take them.
    Exit status 1 if a run breaks off (it stays in the table, and the others go on).
    """
    from quorate.conditions import parse_until
    from quorate.reporting.comparison import make_rows, measure_of, summary_of
    from quorate.reporting.figures import draw_comparison, has_panels

    place = choose_place(cluster, on_ray, subject, update, threads)
    workers = parse_workers(cluster.workers)
    chosen = choose_policies(policies, workers, options.given())
    _check_figure(figure, out, subject.no_gradients, chosen)
    if subject.no_gradients and target is not None:
        raise BadInput(f"target is {target!r}, but without gradients nothing is measured; leave out one of the two")
    if target is None and subject.task == "digits" and not subject.no_gradients:
        target = DIGITS_TARGET
    goal = None if target is None else parse_until(target)
    plan = make_plan(subject, workers, place, cluster.patience, end, update)
    contenders = [Contender(policy.name, label(policy, workers.total), policy) for policy in chosen]
    folder = None
    if out is not None:
        folder = ComparisonFolder(out, [contender.name for contender in contenders])
        folder.check_free("name another, or move it away")

    with at_work(threads), reporter(output.quiet) as report:
        outcomes = run_all(plan, contenders, goal, report, folder)
    rows = make_rows(outcomes, goal)
    if folder is not None:
        folder.write(outcomes, rows, goal)
    if has_panels(outcomes):
        for file in (figure, None if out is None else out / FIGURE_FILE):
            if file is not None:
                draw_comparison(outcomes, goal, file)
    if output.json:
        print_json(summary_of(outcomes, goal))
    else:
        print_table(rows, goal, measure_of(outcomes, goal), outcomes[0].metrics.header)
    broken = [outcome for outcome in outcomes if outcome.broke_off is not None]
    for outcome in broken:
        sys.stderr.write(f"error: {outcome.label}: {outcome.broke_off}\n")
    return 1 if broken else 0


def choose_place(
    cluster: ComparedCluster, on_ray: RayOptions, subject: SubjectOptions, update: UpdateOptions, threads: int
) -> Place:
    """The engine that was asked for. What only another one knows is refused rather than left unheeded."""
    check_engine(cluster.engine, ENGINES)
    if cluster.engine == SIMULATED:
        on_ray.refuse()
        _refuse({"wire": cluster.wire}, "simulated gradients are not sent anywhere", "--engine local")
        return Simulation(
            latency=cluster.latency or DEFAULT_LATENCY,
            network=cluster.network,
            faults=cluster.faults,
            device=update.device,
            together=update.together,
        )
    not_real = {
        "network": cluster.network,
        "no_gradients": subject.no_gradients or None,
        "together": update.together or None,
        "apart": True if update.together is False else None,
    }
    _refuse(not_real, f"the {cluster.engine} engine's workers are real", "--engine simulated")
    # Machines of a cluster are uneven by themselves; processes of one are not.
    delays = DEFAULT_DELAYS if cluster.engine == LOCAL else None
    return place_of_real_workers(
        cluster.engine,
        on_ray,
        threads=threads,
        device=update.device,
        latency=cluster.latency or delays,
        faults=cluster.faults,
        wire=cluster.wire,
    )


def _refuse(options: dict[str, Any], why: str, other_engine: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise BadInput(f"{shown(name, value)} was given, but {why}; leave it out, or add {other_engine}")


def _check_figure(figure: Path | None, out: Path | None, no_gradients: bool, policies: list[Policy]) -> None:
    """Refuse before the runs what would fail after them."""
    from quorate.reporting.figures import FORMATS, check_can_draw

    if figure is None and out is None:
        return
    check_can_draw()
    if figure is None:
        return
    if figure.suffix not in FORMATS:
        raise BadInput(f"figure is {str(figure)!r}, but its name must end in one of: {', '.join(FORMATS)}")
    if figure.is_dir():
        raise BadInput(f"figure is {str(figure)!r}, which is a folder; name a file in it")
    if not figure.parent.is_dir():
        raise BadInput(
            f"figure is {str(figure)!r}, but the folder {str(figure.parent)!r} does not exist; make it first"
        )
    if no_gradients and all(policy.name != "full-sync" for policy in policies):
        raise BadInput("a figure without gradients shows the rounds of full-sync; add it to --policies")
