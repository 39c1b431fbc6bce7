"""`quorate demo`: why backup workers are worth having, measured in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quorate.cli._comparing import FIGURE_FILE, TABLE_FILE, ComparisonFolder, Contender, run_all
from quorate.cli._demo_text import sentences
from quorate.cli._options import ClusterOptions, EndOptions, SubjectOptions, UpdateOptions
from quorate.cli._policies import label
from quorate.cli._progress import reporter
from quorate.cli._running import make_plan, torch_threads
from quorate.cli._show import console
from quorate.cli._table import print_table
from quorate.policies import Async, BackupSync, FullSync, Policy, SoftSync

WORKERS = "6+2"
LATENCY = "lognormal:0.05,0.2*pauses:0.05,10"
TARGET = "accuracy>=0.95"
EPOCHS = 20


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
    from quorate.reporting.comparison import make_rows
    from quorate.reporting.figures import check_can_draw, draw_comparison
    from quorate.tasks.digits import Digits
    from quorate.training import parse_until

    check_can_draw()
    plan = make_plan(
        SubjectOptions(seed=seed),
        ClusterOptions(workers=WORKERS, latency=LATENCY),
        EndOptions(epochs=EPOCHS),
        UpdateOptions(),
    )
    goal = parse_until(TARGET)
    entrants = contenders(plan.workers.total)
    folder = ComparisonFolder(out, [contender.name for contender in entrants])
    if overwrite:
        folder.clear()
    folder.check_free("name another folder, or add --overwrite")
    with torch_threads(1), reporter(quiet=False) as report:
        outcomes = run_all(plan, entrants, goal, report, folder)
    rows = make_rows(outcomes, goal)
    folder.write(outcomes, rows, goal)
    draw_comparison(outcomes, goal, out / FIGURE_FILE)
    screen = console()
    screen.print(f"{plan.workers.total} workers, latency {LATENCY}, {EPOCHS} epochs, seed {seed}\n", markup=False)
    print_table(rows, goal, goal.name)
    for sentence in sentences(rows, goal, Digits().lr):
        screen.print("\n" + sentence, markup=False)
    screen.print(
        f"\nIn {str(out)!r}: {FIGURE_FILE}, {TABLE_FILE}, and a folder a run for quorate replay.", markup=False
    )


def contenders(workers: int) -> list[Contender]:
    """Four policies at one learning rate, good for full sync, and the stale ones again at one good for them."""
    from quorate.cli._demo_tasks import DigitsForAsync, DigitsForSoftSync

    policies: list[Policy] = [FullSync(), BackupSync(6, 2), Async(), SoftSync(6)]
    same = [Contender(policy.name, label(policy, workers), policy) for policy in policies]
    gentle = [
        Contender(
            f"{policy.name}-lr-{kind().lr:g}",
            f"{label(policy, workers)}, lr {kind().lr:g}",
            policy,
            f"{kind.__module__}:{kind.__name__}",
        )
        for policy, kind in ((policies[2], DigitsForAsync), (policies[3], DigitsForSoftSync))
    ]
    return same + gentle
