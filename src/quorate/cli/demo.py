"""`quorate demo`: why backup workers are worth having, measured in under a minute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quorate.cli._comparing import FIGURE_FILE, TABLE_FILE, ComparisonFolder, Contender, run_all
from quorate.cli._demo_text import SameRate, sentences
from quorate.cli._engines import Processes
from quorate.cli._options import EndOptions, LearningOptions, TaskOptions
from quorate.cli._policies import Workers, label
from quorate.cli._progress import Reporter, reporter
from quorate.cli._running import Plan, at_work, make_plan
from quorate.cli._show import console
from quorate.cli._table import print_table
from quorate.policies import Async, BackupSync, FullSync, Policy, SoftSync

if TYPE_CHECKING:
    from quorate.conditions import Until
    from quorate.reporting.comparison import Outcome
    from quorate.tasks.digits import Digits

WORKERS = Workers(quorum=6, backups=2)
LATENCY = "lognormal:0.01,0.2*pauses:0.05,10"
TARGET = "accuracy>=0.95"
EPOCHS, EPOCHS_AT_SAME_RATE = 20, 5
PATIENCE_S = 60.0
SEED = 1  # with 0, softsync takes 25 epochs or never gets there; with 1 to 4, 17 or 18 (see _demo_tasks.py)


def demo(
    out: Annotated[Path, typer.Option(help="Where to leave the traces, the table and the figure.")] = Path("demo"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove an earlier demo's own files there, nothing else.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Draws parameters, order of samples and delays.")] = SEED,
) -> None:
    """Handwritten digits on 8 workers that pause now and then: full sync, backup workers, async and softsync.

    The workers are processes of this machine and the seconds are real; only the delays are artificial.
    A worker waits some 10 ms before each gradient, and one time in twenty ten times as long.
    """
    from quorate.conditions import parse_until
    from quorate.reporting.comparison import make_rows
    from quorate.reporting.figures import check_can_draw, draw_comparison

    check_can_draw()
    place = Processes(threads=1, device="cpu", latency=LATENCY, faults=None, wire=None)
    plan = make_plan(TaskOptions(seed=seed), WORKERS, place, PATIENCE_S, EndOptions(epochs=EPOCHS), LearningOptions())
    goal = parse_until(TARGET)
    entrants, rates = contenders()
    folder = ComparisonFolder(out, [contender.name for contender in entrants])
    if overwrite:
        folder.clear()
    folder.check_free("name another folder, or add --overwrite")
    with at_work(place.threads), reporter(quiet=False) as report:
        outcomes = run_all(plan, entrants, goal, report, folder)
        same_rate = _at_the_same_rate(plan, outcomes, rates["full-sync"], goal, report)
    rows = make_rows(outcomes, goal)
    folder.write(outcomes, rows, goal)
    draw_comparison(outcomes, goal, out / FIGURE_FILE)

    print_table(rows, goal, goal.name, outcomes[0].metrics.header)
    screen = console()
    for sentence in sentences(rows, goal, rates, same_rate):
        screen.print("\n" + sentence, markup=False)
    screen.print(
        f"\nIn {str(out)!r}: {FIGURE_FILE}, {TABLE_FILE}, and a folder a run for quorate replay.", markup=False
    )


def contenders() -> tuple[list[Contender], dict[str, float]]:
    """The four policies, each at the learning rate that suits it, and these rates."""
    from quorate.cli._demo_tasks import DigitsForAsync, DigitsForSoftSync
    from quorate.tasks.digits import Digits

    usual = Digits().lr
    chosen: list[tuple[Policy, type[Digits]]] = [
        (FullSync(), Digits),
        (BackupSync(WORKERS.quorum, WORKERS.backups), Digits),
        (Async(), DigitsForAsync),
        (SoftSync(WORKERS.quorum), DigitsForSoftSync),
    ]
    rates = {policy.name: kind().lr for policy, kind in chosen}
    entrants = []
    for policy, kind in chosen:
        name = label(policy, WORKERS.total)
        if rates[policy.name] == usual:
            entrants.append(Contender(policy.name, name, policy))
        else:
            place = f"{kind.__module__}:{kind.__name__}"
            entrants.append(Contender(policy.name, f"{name}, lr {rates[policy.name]:g}", policy, place))
    return entrants, rates


def _at_the_same_rate(plan: Plan, outcomes: list[Outcome], lr: float, goal: Until, report: Reporter) -> SameRate:
    """Async for a few epochs at full sync's rate, and full sync after as many."""
    from quorate.reporting.comparison import make_rows

    policy = Async()
    epochs = min(EPOCHS_AT_SAME_RATE, EPOCHS)
    entrant = Contender(policy.name, f"{label(policy, WORKERS.total)}, lr {lr:g}", policy)
    stale = run_all(replace(plan, epochs=epochs), [entrant], goal, report, None)
    full = outcomes[0].metrics
    as_many = epochs * full.header["samples"]
    full_accuracy = [one.measures[goal.name] for one in full.evaluations if one.samples <= as_many][-1]
    return SameRate(lr, epochs, full_accuracy, make_rows(stale, goal)[0])
