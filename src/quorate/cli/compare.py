"""`quorate compare`: several policies on one task, with the same seed and the same latencies."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quorate.cli.engine_options import RayOptions, choose_place
from quorate.cli.options import (
    DEFAULT_LATENCY,
    END,
    KEPT,
    POLICY,
    ClusterOptions,
    EndOptions,
    EngineOptions,
    OutputOptions,
    PolicyOptions,
    TaskOptions,
    UpdateOptions,
    grouped,
    latency_option,
    option,
    out_option,
    workers_option,
)
from quorate.cli.output import console, print_json, print_table, what_next
from quorate.cli.policy_options import choose_policies, label, parse_workers
from quorate.cli.progress import Reporter, reporter
from quorate.cli.run_command import RunSpec, make_run_spec, run_environment
from quorate.errors import BadInput, Diverged, LearnerLost, QuorumLost
from quorate.policies import FullSync, Policy
from quorate.reporting.comparison import ComparedRun, Row, csv_text, make_rows, measure_of, summary_of
from quorate.reporting.figures import FORMATS, check_can_draw, draw_comparison, has_panels
from quorate.stopping import KnownMeasure, Until, parse_until
from quorate.trace import TRACE_FILE, Recorder

FIGURE_FILE, TABLE_FILE, SUMMARY_FILE = "figure.png", "table.csv", "summary.json"
RUN_FILES = (TRACE_FILE, "summary.json", "parameters.safetensors")
CHECKPOINTS, CHECKPOINT_FILES = "checkpoints", ("tensors.safetensors", "state.json", "manifest.json")


def contender_of(policy: Policy, workers: int, task: str | None) -> Contender:
    """The contender of this policy; for digits, with the learning rate tuned for the policy."""
    from quorate.tasks.digits import TUNED

    name = label(policy, workers)
    kind = TUNED.get(policy.name) if task == "digits" else None
    if kind is None:
        return Contender(name, policy)
    return Contender(f"{name}, lr {kind().lr:g}", policy, f"{kind.__module__}:{kind.__name__}", kind().lr)


@dataclass(frozen=True)
class Contender:
    """One run of a comparison, before it is made."""

    label: str
    policy: Policy
    task: str | None = None  # None: the task of the RunSpec
    lr: float | None = None  # None: the learning rate of the task

    @property
    def name(self) -> str:
        """Key of the run, and name of its folder."""
        return self.policy.name


class ComparisonFolder:
    """A folder with one sub-folder per run, a table, a figure and a summary. It never removes other files."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self._names = names
        self._made = not path.exists()

    def check_free(self, remedy: str, may_hold_others: bool = False) -> None:
        """Refuse a folder that holds a comparison, or anything else unless `may_hold_others`."""
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"out is {str(self.path)!r}, which is a file; name a new folder")
        for file in self._files():
            if file.exists():
                there = file.relative_to(self.path)
                raise BadInput(f"the folder {str(self.path)!r} already holds a comparison ({there}); {remedy}")
        other = None if may_hold_others or self._made else next(self.path.iterdir(), None)
        if other is not None:
            raise BadInput(f"the folder {str(self.path)!r} is not empty ({other.name}); {remedy}")

    def clear(self) -> None:
        """Remove the files of a comparison, and nothing else; links are not followed."""
        for file in self._files():
            if not file.parent.is_symlink() and (file.is_file() or file.is_symlink()):
                file.unlink()
        for name in self._names:
            _clear_checkpoints(self.path / name / CHECKPOINTS)
            _remove_if_empty(self.path / name)

    def discard(self) -> None:
        """Remove the runs made so far, after bad input that was only found on the way."""
        self.clear()
        if self._made:
            _remove_if_empty(self.path)

    def write(self, outcomes: Sequence[ComparedRun], rows: Sequence[Row], target: Until | None) -> None:
        """Write the table and the summary, without the figure."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / TABLE_FILE).write_text(csv_text(rows), encoding="utf-8")
        text = json.dumps(summary_of(outcomes, target), indent=2)
        (self.path / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")

    def _files(self) -> list[Path]:
        runs = [self.path / name / file for name in self._names for file in RUN_FILES]
        return [*runs, *(self.path / file for file in (FIGURE_FILE, TABLE_FILE, SUMMARY_FILE))]


def _clear_checkpoints(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not folder.parent.is_symlink():
        for checkpoint in folder.iterdir():
            if checkpoint.is_dir() and not checkpoint.is_symlink():
                for name in CHECKPOINT_FILES:
                    (checkpoint / name).unlink(missing_ok=True)
                _remove_if_empty(checkpoint)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def run_all(
    spec: RunSpec,
    contenders: Sequence[Contender],
    target: Until | None,
    reporter: Reporter,
    folder: ComparisonFolder | None,
) -> list[ComparedRun]:
    """Make the runs one after the other. A run that breaks off (diverged, quorum lost …) is a result too."""
    try:
        return [_run_one(spec, contender, target, reporter, folder) for contender in contenders]
    except BadInput:
        if folder is not None:
            folder.discard()
        raise


def _run_one(
    spec: RunSpec, contender: Contender, target: Until | None, reporter: Reporter, folder: ComparisonFolder | None
) -> ComparedRun:
    from quorate.metrics import Metrics
    from quorate.reporting.rounds import WholeRounds

    metrics, arrivals = Metrics(), WholeRounds()
    recorders: list[Recorder] = [metrics]
    policy = contender.policy
    if policy.waits_for_all():
        recorders.append(arrivals)
    if target is not None:
        recorders.append(KnownMeasure(target, ends_run=False))
    broke_off = None
    try:
        spec.run(
            policy,
            contender.label,
            reporter,
            task=contender.task,
            out=None if folder is None else folder.path / contender.name,
            recorders=tuple(recorders),
        )
    except (Diverged, LearnerLost, QuorumLost) as error:
        broke_off = str(error)
        metrics.ended(metrics.seconds, metrics.updates, broke_off, None)
    return ComparedRun(
        name=contender.name, label=contender.label, metrics=metrics, broke_off=broke_off, kth_arrivals=arrivals.times
    )


#: A tenth of the simulated default, because these delays are real.
DEFAULT_DELAYS = "pause:0.005,0.05,10"
DEFAULT_WORKERS = "6+2"
DEFAULT_POLICIES = "full-sync,backup,async,softsync"
DIGITS_TARGET = "accuracy>=0.95"


@dataclass(frozen=True, kw_only=True)
class ComparedCluster(ClusterOptions):
    """The cluster of all runs; policies without backups use the backups as ordinary workers."""

    workers: Annotated[str | None, workers_option(DEFAULT_WORKERS)] = None
    latency: Annotated[
        str | None,
        latency_option(f"none; {DEFAULT_DELAYS} for digits on local workers, {DEFAULT_LATENCY} simulated"),
    ] = None


@grouped
def compare(
    *,
    subject: TaskOptions,
    engine: EngineOptions,
    cluster: ComparedCluster,
    on_ray: RayOptions,
    policies: Annotated[
        str, option(POLICY, "What to compare; speed-ups are against the first.", metavar="NAME,NAME,…")
    ] = DEFAULT_POLICIES,
    options: PolicyOptions,
    end: EndOptions,
    target: Annotated[
        str | None,
        option(
            END,
            "Measure the time to this, e.g. 'accuracy>=0.95'; runs do not stop at it.",
            show_default=f"{DIGITS_TARGET} for digits",
            metavar="CONDITION",
        ),
    ] = None,
    update: UpdateOptions,
    out: Annotated[Path | None, out_option("nothing is saved")] = None,
    figure: Annotated[Path | None, option(KEPT, "Draw the comparison into this file.", metavar="FILE.png")] = None,
    output: OutputOptions,
) -> int:
    """Train a task under several policies and compare the results.

    All runs use the same data and equally slow workers. An option goes to the policies that have it.
    Exit status 1 if a run breaks off; it stays in the table, and the other runs continue.
    """
    # Processes of one machine are equally fast, so digits gets delays to show a difference; a user's task never does.
    delays = DEFAULT_DELAYS if subject.task == "digits" else None
    place = choose_place(engine, cluster, on_ray, subject, update, delays)
    workers = parse_workers(cluster.workers or DEFAULT_WORKERS)
    chosen = choose_policies(policies, workers, options.given(), options.policy_option or ())
    _check_figure(figure, out, subject.no_gradients, chosen)
    if subject.no_gradients and target is not None:
        raise BadInput(f"target is {target!r}, but without gradients nothing is measured; leave out one of the two")
    if target is None and subject.task == "digits" and not subject.no_gradients:
        target = DIGITS_TARGET
    goal = None if target is None else parse_until(target)
    spec = make_run_spec(subject, workers.total, place, cluster.patience, end, update)
    contenders = [contender_of(policy, workers.total, spec.task) for policy in chosen]
    folder = None
    if out is not None:
        folder = ComparisonFolder(out, [contender.name for contender in contenders])
        folder.check_free("name a new one")

    with run_environment(cluster.threads), reporter(output.quiet) as report:
        outcomes = run_all(spec, contenders, goal, report, folder)
    rows = make_rows(outcomes, goal)
    if folder is not None:
        folder.write(outcomes, rows, goal)
    if has_panels(outcomes):
        for file in (figure, None if out is None else out / FIGURE_FILE):
            if file is not None:
                draw_comparison(outcomes, goal, file)
    rates = "" if spec.task is None else learning_rates(contenders, spec.task)
    if output.json:
        print_json({**summary_of(outcomes, goal), "learning_rates": rates or None, "out": out and str(out)})
    else:
        header = outcomes[0].metrics.header
        print_table(rows, goal, measure_of(outcomes, goal), header)
        latency = place.options["latency"]
        held_back = f"Workers were held back on purpose ({latency}); --latency none runs without."
        for line in (rates, held_back if place.real and latency else "", what_next(out, "traces")):
            if line:
                console().print(line, markup=False)
    broken = [outcome for outcome in outcomes if outcome.broke_off is not None]
    for outcome in broken:
        sys.stderr.write(f"error: {outcome.label}: {outcome.broke_off}\n")
    return int(bool(broken))


def learning_rates(contenders: Sequence[Contender], task: str) -> str:
    """The learning rates of the runs; a stale policy looks worse than it is at the rate of a synchronous one."""
    tuned = [f"{one.name} {one.lr:g}" for one in contenders if one.lr is not None]
    stale = [one.name for one in contenders if one.lr is None and one.policy.staleness_bound != 0]
    if tuned:
        return f"Learning rates: the task's own, and those that suit the digits best: {', '.join(tuned)}."
    own = f"Learning rate: that of {task}, for every policy."
    if not stale:
        return own
    return f"{own} Stale gradients usually need a lower one: {' and '.join(stale)} may do better at theirs."


def _check_figure(figure: Path | None, out: Path | None, no_gradients: bool, policies: list[Policy]) -> None:
    """Refuse a figure before the runs if it could not be drawn after them."""
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
    if no_gradients and not any(policy.waits_for_all() for policy in policies):
        raise BadInput(f"a figure without gradients shows the rounds of {FullSync.name}; add it to --policies")
