"""Is the planner right? Plan from the run of one configuration, then really run every split.

    python -m benchmarks.planning [--updates 10000] [--seeds 3] [--local] [--only WORLD] [--out FILE]

For each world: how far the predicted seconds per update are from what ran (worst split, and all of them), and how much
slower the chosen split is than the best one found by running all. Simulated worlds in virtual time; with --local also
real worker processes on the digits task, with and without artificial delays, splits run in turn, repeats interleaved.
`--out FILE` adds what was run to a JSON file; `python -m benchmarks.tables` makes the page's table of it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import quorate
from quorate.planning import Plan, plan

SIMULATED = {
    "exponential": "shifted-exp:0.05,0.025",
    "heavy pauses": "pause:0.05,0.05,10",
    "one always slow": "shifted-exp:0.05,0.01*slow:3=4",
    "correlated spells": "shifted-exp:0.05,0.01*spells:10,2,3,0.5",
    "lognormal": "lognormal:0.05,0.6",
    "chen2016": "chen2016",
}
DELAYS = {"local, pauses": "pause:0.05,0.05,10", "local, exponential": "shifted-exp:0.05,0.025"}
MACHINES = 8

Run = Callable[[quorate.Policy, int, Path | None], float]  # policy, seed, folder -> seconds per update


def simulated(latency: str, updates: int) -> Run:
    def run(policy: quorate.Policy, seed: int, out: Path | None) -> float:
        engine = quorate.Simulated(MACHINES, latency)
        result = quorate.train(None, policy, engine, updates=updates, seed=seed, out=out, patience_s=math.inf)
        return result.metrics.seconds / result.metrics.updates

    return run


def local(latency: str | None, updates: int) -> Run:
    def run(policy: quorate.Policy, seed: int, out: Path | None) -> float:
        engine = quorate.Local(MACHINES, latency=latency)
        result = quorate.train("digits", policy, engine, updates=updates, seed=seed, out=out, evaluate_every=updates)
        mean = result.metrics.update_seconds.mean
        assert mean is not None
        return mean

    return run


class Row(NamedTuple):
    """A plan beside the splits as run, all from N = 1 on: seconds an update; chosen: the quorum that it recommends."""

    world: str
    source: str  # the policy of the run that it is made from, with its quorum
    updates: int
    seed: int
    planned_s: list[float]
    real_s: list[float]
    needed: list[float]  # updates to the target by the plan, relative
    chosen: int

    @property
    def errors(self) -> list[float]:
        """How far each split's prediction is from its run, as a share."""
        return [planned / real - 1 for planned, real in zip(self.planned_s, self.real_s, strict=True)]

    @property
    def behind(self) -> float:
        """How much longer the chosen split takes to the target than the best one."""
        costs = [real * updates for real, updates in zip(self.real_s, self.needed, strict=True)]
        return costs[self.chosen - 1] / min(costs) - 1


def check(
    name: str, run: Run, updates: int, seeds: int, configurations: list[quorate.Policy], repeats: int = 1
) -> list[Row]:
    """One row for each seed and each configuration that the plan is made from."""
    rows = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            plans = []
            for number, policy in enumerate(configurations):
                out = Path(folder) / str(number)
                run(policy, seed, out)
                plans.append(plan(out))
            splits = [(split.quorum, split.backups) for split in plans[0].splits]
            # Other draws than those planned from: held out.
            others = range(100 + seed, 100 + seed + repeats)
            found = [[run(quorate.BackupSync(*split), other, None) for split in splits] for other in others]
        real = [statistics.median(times) for times in zip(*found, strict=True)]
        for policy, made in zip(configurations, plans, strict=True):
            source = f"{policy.name} {getattr(policy, 'quorum', MACHINES)}/{MACHINES}"
            rows.append(row_of(name, source, updates, seed, made, real))
            say(rows[-1])
    return rows


def row_of(name: str, source: str, updates: int, seed: int, made: Plan, real: list[float]) -> Row:
    planned = [split.mean for split in made.splits]
    needed = [split.updates for split in made.splits]
    return Row(name, source, updates, seed, planned, real, needed, made.recommendation.quorum)


def say(row: Row) -> None:
    print(
        f"{f'{row.world}, from {row.source}, seed {row.seed}':<50} worst {max(row.errors, key=abs):+6.1%}  "
        f"chosen {row.chosen}+{MACHINES - row.chosen}, {row.behind:.1%} behind the best  all "
        + " ".join(f"{100 * error:+.1f}" for error in row.errors),
        flush=True,
    )


def keep(rows: list[Row], file: Path) -> None:
    """Put rows into the file, in place of those of the same world."""
    kept = json.loads(file.read_text()) if file.exists() else []
    again = {row.world for row in rows}
    lines = [
        json.dumps(row) for row in [*(one for one in kept if one["world"] not in again), *(r._asdict() for r in rows)]
    ]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--local", action="store_true", help="also real processes; minutes, on a machine with nothing else to do"
    )
    parser.add_argument("--only", help="one world")
    parser.add_argument("--out", type=Path, metavar="FILE", help="put what was run into this JSON file")
    given = parser.parse_args()
    torch.set_num_threads(1)

    def checked(rows: list[Row]) -> None:
        if given.out is not None:
            keep(rows, given.out)

    for name, latency in SIMULATED.items():
        if given.only in (None, name):
            sources: list[quorate.Policy] = [quorate.FullSync(), quorate.BackupSync(6, 2)]
            checked(check(name, simulated(latency, given.updates), given.updates, given.seeds, sources))
    if given.only in (None, "recorded"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "recorded"
            engine = quorate.Local(MACHINES, latency="shifted-exp:0.02,0.01*pauses:0.04,6")
            quorate.train("digits", quorate.FullSync(), engine, updates=300, out=out)
            replayed = simulated(f"trace:{out}", 300)
            checked(check("a recorded local run, played again", replayed, 300, 1, [quorate.FullSync()]))
    if given.local:
        for name, delay in DELAYS.items():
            if given.only in (None, name):
                checked(check(name, local(delay, 200), 200, 1, [quorate.FullSync()], repeats=2))


if __name__ == "__main__":
    main()
