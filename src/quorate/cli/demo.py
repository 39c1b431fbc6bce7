"""`quorate demo`: why backup workers are worth having, measured in under a minute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorate.cli._comparing import FIGURE_FILE, TABLE_FILE, ComparisonFolder, Contender, run_all
from quorate.cli._demo_text import SameRate, sentences
from quorate.cli._options import ClusterOptions, EndOptions, SubjectOptions, UpdateOptions
from quorate.cli._policies import label
from quorate.cli._progress import Reporter, reporter
from quorate.cli._running import Plan, make_plan, torch_threads
from quorate.cli._show import console
from quorate.cli._table import print_table
from quorate.policies import Async, BackupSync, FullSync, Policy, SoftSync

if TYPE_CHECKING:
    from quorate.conditions import Until
    from quorate.reporting.comparison import Outcome
    from quorate.tasks.digits import Digits

WORKERS, QUORUM = "6+2", 6
LATENCY = "lognormal:0.05,0.2*pauses:0.05,10"
TARGET = "accuracy>=0.95"
EPOCHS, EPOCHS_AT_SAME_RATE = 25, 5


def demo(
    out: Annotated[Path, typer.Option(help="Where to leave the traces, the table and the figure.")] = Path("demo"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove an earlier demo's own files there, nothing else.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds, equal runs.")] = 0,
) -> None:
    """Handwritten digits on 8 workers that pause now and then: full sync, backup workers, async and softsync.

    The gradients are real, the clock is simulated. A ticket takes about 50 ms, and one in twenty ten times that.
    """
    from quorate.conditions import parse_until
    from quorate.reporting.comparison import make_rows
    from quorate.reporting.figures import check_can_draw, draw_comparison

    check_can_draw()
    subject, cluster = SubjectOptions(seed=seed), ClusterOptions(workers=WORKERS, latency=LATENCY)
    plan = make_plan(subject, cluster, EndOptions(epochs=EPOCHS), UpdateOptions())
    goal = parse_until(TARGET)
    entrants, rates = contenders(plan.workers.total)
    folder = ComparisonFolder(out, [contender.name for contender in entrants])
    if overwrite:
        folder.clear()
    folder.check_free("name another folder, or add --overwrite")
    with torch_threads(1), reporter(quiet=False) as report:
        outcomes = run_all(plan, entrants, goal, report, folder)
        same_rate = _at_the_same_rate(plan, outcomes, rates["full-sync"], goal, report)
    rows = make_rows(outcomes, goal)
    folder.write(outcomes, rows, goal)
    draw_comparison(outcomes, goal, out / FIGURE_FILE)

    screen = console()
    screen.print(f"{plan.workers.total} workers, latency {LATENCY}, {EPOCHS} epochs, seed {seed}\n", markup=False)
    print_table(rows, goal, goal.name)
    for sentence in sentences(rows, goal, rates, same_rate):
        screen.print("\n" + sentence, markup=False)
    screen.print(
        f"\nIn {str(out)!r}: {FIGURE_FILE}, {TABLE_FILE}, and a folder a run for quorate replay.", markup=False
    )


def contenders(workers: int) -> tuple[list[Contender], dict[str, float]]:
    """The four policies, each at the learning rate that suits it, and these rates."""
    from quorate.cli._demo_tasks import DigitsForAsync, DigitsForSoftSync
    from quorate.tasks.digits import Digits

    usual = Digits().lr
    chosen: list[tuple[Policy, type[Digits]]] = [
        (FullSync(), Digits),
        (BackupSync(QUORUM, workers - QUORUM), Digits),
        (Async(), DigitsForAsync),
        (SoftSync(QUORUM), DigitsForSoftSync),
    ]
    rates = {policy.name: kind().lr for policy, kind in chosen}
    entrants = []
    for policy, kind in chosen:
        name = label(policy, workers)
        if rates[policy.name] == usual:
            entrants.append(Contender(policy.name, name, policy))
        else:
            place = f"{kind.__module__}:{kind.__name__}"
            entrants.append(Contender(policy.name, f"{name}, lr {rates[policy.name]:g}", policy, place))
    return entrants, rates


def _at_the_same_rate(plan: Plan, outcomes: list[Outcome], lr: float, goal: Until, report: Reporter) -> SameRate:
    """The stale policies for a few epochs at full sync's rate, and full sync after as many."""
    from quorate.reporting.comparison import make_rows

    policies: list[Policy] = [Async(), SoftSync(QUORUM)]
    entrants = [Contender(policy.name, label(policy, plan.workers.total), policy) for policy in policies]
    epochs = min(EPOCHS_AT_SAME_RATE, EPOCHS)
    stale = run_all(replace(plan, epochs=epochs), entrants, goal, report, None)
    full = outcomes[0].metrics
    as_many = epochs * full.header["samples"]
    full_accuracy = [one.measures[goal.name] for one in full.evaluations if one.samples <= as_many][-1]
    return SameRate(lr, epochs, full_accuracy, make_rows(stale, goal))
