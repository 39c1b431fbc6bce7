"""`quorate demo`: the effect of backup workers, measured in under a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

from quorate.cli.compare import FIGURE_FILE, TABLE_FILE, ComparisonFolder, Contender, contender_of, run_all
from quorate.cli.engine_options import Place
from quorate.cli.options import (
    KEPT,
    LOCAL,
    SEED_HELP,
    SUBJECT,
    EndOptions,
    OutputOptions,
    TaskOptions,
    UpdateOptions,
    grouped,
    option,
)
from quorate.cli.output import console, print_json, print_table, what_next
from quorate.cli.policy_options import WorkerCounts, label
from quorate.cli.progress import Reporter, reporter
from quorate.cli.run_command import RunSpec, make_run_spec, run_environment
from quorate.policies import Async, BackupSync, FullSync, SoftSync
from quorate.reporting.comparison import ComparedRun, Row, make_rows, summary_of
from quorate.reporting.figures import check_can_draw, draw_comparison
from quorate.stopping import Until, parse_until


class SameRate(NamedTuple):
    """Accuracy of a stale policy at the learning rate of the synchronous ones, after a few epochs."""

    lr: float
    epochs: int
    full_accuracy: float
    stale: Row


def sentences(rows: Sequence[Row], target: Until, rates: dict[str, float], same_rate: SameRate) -> list[str]:
    """Three findings: the fastest policy, the effect of learning rates, and the cost of dropped work."""
    by_name = {row.name: row for row in rows}
    full, backup = by_name[FullSync.name], by_name[BackupSync.name]
    return [
        _first(rows, f"{target.target:.0%} test accuracy"),
        _rates(full, rates, same_rate),
        f"{backup.label} dropped {backup.dropped_share:.0%} of its tickets, and so {backup.wasted_share:.0%} of its "
        f"workers' time; under {full.label} they spent {full.waiting_share:.0%} of it waiting for the slowest.",
    ]


def _first(rows: Sequence[Row], goal: str) -> str:
    winner = min((row for row in rows if row.time_to_target_s is not None), key=_time, default=None)
    if winner is None:
        return f"No policy reached {goal}."
    others = ", ".join(f"{_short(row)} {_compared(row, winner)}" for row in rows if row is not winner)
    return f"{_short(winner)} was the first to reach {goal}, after {_time(winner):.1f} s; {others}."


def _compared(row: Row, winner: Row) -> str:
    if row.time_to_target_s is None:
        return "broke off" if row.broke_off else "never did"
    return f"took {_time(row):.1f} s (×{_time(row) / _time(winner):.1f})"


def _rates(full: Row, rates: dict[str, float], same: SameRate) -> str:
    stale = same.stale
    chosen = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    accuracy = "broke off" if stale.broke_off is not None or stale.final is None else f"at {stale.final:.0%}"
    return (
        f"Each ran at the learning rate that was best for it of those tried: {chosen}. "
        f"At {same.lr:g} and after {same.epochs} epochs, {full.label} is at {same.full_accuracy:.0%}, "
        f"{_short(stale)} {accuracy}; its gradients were {stale.staleness_mean:.1f} versions old on average."
    )


def _short(row: Row) -> str:
    return row.label.partition(",")[0]


def _time(row: Row) -> float:
    assert row.time_to_target_s is not None
    return row.time_to_target_s


WORKERS = WorkerCounts(quorum=6, backups=2)
LATENCY = "lognormal:0.01,0.2*pauses:0.05,10"
TARGET = "accuracy>=0.95"
EPOCHS, EPOCHS_AT_SAME_RATE = 25, 5
PATIENCE_S = 60.0


@grouped
def demo(
    *,
    out: Annotated[Path, option(KEPT, "A folder for the traces, the table and the figure.", metavar="FOLDER")] = Path(
        "demo"
    ),
    overwrite: Annotated[
        bool, option(KEPT, "Remove an earlier demo's own files there, nothing else.", "--overwrite")
    ] = False,
    seed: Annotated[int, option(SUBJECT, SEED_HELP)] = 0,
    output: OutputOptions,
) -> None:
    """Handwritten digits on 8 workers that pause now and then: full sync, backup workers, async and softsync.

    The workers are processes of this machine and the seconds are real; only the delays are artificial.
    A worker waits some 10 ms before each gradient, and one time in twenty ten times as long.
    """
    check_can_draw()
    place = Place(LOCAL, {"latency": LATENCY})
    spec = make_run_spec(
        TaskOptions(seed=seed), WORKERS.total, place, PATIENCE_S, EndOptions(epochs=EPOCHS), UpdateOptions()
    )
    goal = parse_until(TARGET)
    chosen, rates = contenders()
    folder = ComparisonFolder(out, [contender.name for contender in chosen])
    if overwrite:
        folder.clear()
    folder.check_free("name another folder, or add --overwrite", may_hold_others=overwrite)
    with run_environment(threads=1), reporter(output.quiet) as report:
        outcomes = run_all(spec, chosen, goal, report, folder)
        same_rate = _at_the_same_rate(spec, outcomes, rates[FullSync.name], goal, report)
    rows = make_rows(outcomes, goal)
    folder.write(outcomes, rows, goal)
    draw_comparison(outcomes, goal, out / FIGURE_FILE)

    said = sentences(rows, goal, rates, same_rate)
    if output.json:
        print_json({**summary_of(outcomes, goal), "findings": said, "learning_rates": rates, "out": str(out)})
        return
    print_table(rows, goal, goal.name, outcomes[0].metrics.header)
    screen = console()
    for sentence in said:
        screen.print("\n" + sentence, markup=False)
    screen.print(f"\nIn {str(out)!r}: {FIGURE_FILE}, {TABLE_FILE}, and a folder a run.", markup=False)
    screen.print(what_next(out), markup=False)


def contenders() -> tuple[list[Contender], dict[str, float]]:
    """The four policies, each with the learning rate tuned for it, and these rates."""
    from quorate.tasks.digits import Digits

    policies = (FullSync(), BackupSync(WORKERS.quorum, WORKERS.backups), Async(), SoftSync(WORKERS.quorum))
    chosen = [contender_of(policy, WORKERS.total, "digits") for policy in policies]
    return chosen, {contender.name: contender.lr or Digits().lr for contender in chosen}


def _at_the_same_rate(spec: RunSpec, outcomes: list[ComparedRun], lr: float, goal: Until, report: Reporter) -> SameRate:
    """Run async for a few epochs at the rate of full sync, and look up full sync after as many epochs."""
    policy = Async()
    epochs = min(EPOCHS_AT_SAME_RATE, EPOCHS)
    contender = Contender(f"{label(policy, WORKERS.total)}, lr {lr:g}", policy)
    stale = run_all(replace(spec, options={**spec.options, "epochs": epochs}), [contender], goal, report, None)
    full = outcomes[0].metrics
    as_many = epochs * full.header["samples"]
    full_accuracy = [one.measures[goal.name] for one in full.evaluations if one.samples <= as_many][-1]
    return SameRate(lr, epochs, full_accuracy, make_rows(stale, goal)[0])
