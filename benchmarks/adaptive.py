"""`AdaptiveBackup` beside every fixed split, in worlds of all kinds: `python -m benchmarks.adaptive [--workers 8]`.

Progress a second is Σ g(kᵢ)/seconds over the updates of a run: g(k) = k where noise dominates, else 1/(1 + r/k) with
r = noise scale/batch. The best fixed split is found by running all of them on the same seeds. `--local` does the same
on real processes, with artificial delays.

`--out FILE` adds the worlds that were run to a JSON file; `python -m benchmarks.tables` makes the page's tables of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import quorate
from quorate.trace import Recorder, Update

WORLDS = {
    "exponential": "shifted-exp:0.05,0.025",
    "heavy pauses": "pause:0.05,0.05,10",
    "one slow worker": "shifted-exp:0.05,0.01*slow:3=4",
    "shared spells": "shifted-exp:0.05,0.01*spells:10,2,3,0.5",
    "chen2016": "chen2016",
    "lognormal": "lognormal:0.05,0.4",
    "Pareto": "pareto:0.05,1.5",
}
CHANGE = "changes half way"
#: Both halves take about as long, for a split that is good in both.
CHANGES = {8: "shifted-exp:0.05,0.002->60->pause:0.05,0.1,10", 32: "shifted-exp:0.05,0.002->60->pause:0.05,0.1,10"}
RECORDED = "recorded run"
RATIOS: tuple[float | None, ...] = (None, 4.0, 32.0)
LENGTHS = (500, 2000)
LOCAL_DELAYS = "pause:0.03,0.08,8"


class Progress(Recorder):
    """When each version was made, and of how many gradients."""

    def __init__(self) -> None:
        self.made: list[tuple[float, int]] = []
        self.choices: list[str] = []

    def applied(self, time: float, update: Update) -> None:
        self.made.append((time, len(update.tickets)))

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        self.choices.append(f"version {version}: {reason}")

    def a_second(self, updates: int, ratio: float | None) -> float:
        gains = (count if ratio is None else 1 / (1 + ratio / count) for _, count in self.made[:updates])
        return sum(gains) / self.made[updates - 1][0]


class Run(NamedTuple):
    """One simulated run; quorum 0: adaptive, with the noise scale given as `ratio` batches."""

    latency: str
    workers: int
    seed: int
    quorum: int
    ratio: float | None = None


def made(run: Run) -> Progress:
    policy: quorate.Policy = quorate.AdaptiveBackup(noise_scale=run.ratio)
    if run.quorum:
        policy = quorate.BackupSync(run.quorum, run.workers - run.quorum)
    watch = Progress()
    engine = quorate.Simulated(run.workers, run.latency)
    updates = max(LENGTHS)
    samples = run.workers * (updates + 100)  # so that no epoch ends on the way
    quorate.train(
        None, policy, engine, updates=updates, samples=samples, batch_size=1, seed=run.seed, recorders=(watch,)
    )
    return watch


class Row(NamedTuple):
    """Progress a second in a world, after some updates: of every fixed split and of adaptive, seed by seed."""

    world: str
    workers: int
    ratio: float | None
    updates: int
    fixed: dict[str, list[float]]  # by quorum, a text as JSON has it
    adaptive: list[float]
    choices: int

    @property
    def best(self) -> int:
        """The quorum of the best fixed split."""
        return int(max(self.fixed, key=lambda quorum: sum(self.fixed[quorum])))

    @property
    def mean(self) -> float:
        """Adaptive's progress a second over the best split's, all seeds together."""
        return sum(self.adaptive) / sum(self.fixed[str(self.best)])

    @property
    def worst(self) -> float:
        """The same of the worst seed."""
        return min(mine / best for mine, best in zip(self.adaptive, self.fixed[str(self.best)], strict=True))


def compared(world: str, latency: str, workers: int, seeds: int, pool: ProcessPoolExecutor) -> Iterator[Row]:
    fixed = [Run(latency, workers, seed, quorum) for quorum in range(1, workers + 1) for seed in range(seeds)]
    adaptive = [Run(latency, workers, seed, 0, ratio) for ratio in RATIOS for seed in range(seeds)]
    runs = dict(zip(fixed + adaptive, pool.map(made, fixed + adaptive, chunksize=4), strict=True))
    for ratio in RATIOS:
        ours = [runs[Run(latency, workers, seed, 0, ratio)] for seed in range(seeds)]
        choices = max(len(watch.choices) for watch in ours)
        for updates in LENGTHS:
            rates: dict[str, list[float]] = {}
            for run in fixed:
                rates.setdefault(str(run.quorum), []).append(runs[run].a_second(updates, ratio))
            yield Row(world, workers, ratio, updates, rates, [one.a_second(updates, ratio) for one in ours], choices)


def record(folder: Path) -> str:
    """A run of real processes, whose times the simulator then has."""
    engine = quorate.Local(8, latency="shifted-exp:0.02,0.01*pauses:0.03,6")
    quorate.train("digits", quorate.FullSync(), engine, updates=300, evaluate_every=10**6, out=folder / "recorded")
    return f"trace:{folder / 'recorded' / 'trace.jsonl'}"


def keep(rows: list[Row], file: Path) -> None:
    """Put rows into the file, in place of those of the same world and workers."""
    kept = json.loads(file.read_text()) if file.exists() else []
    again = {(row.world, row.workers) for row in rows}
    kept = [row for row in kept if (row["world"], row["workers"]) not in again]
    lines = [json.dumps(row) for row in [*kept, *(row._asdict() for row in rows)]]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def simulated(workers: int, seeds: int, only: str | None, out: Path | None) -> None:
    print("| world | noise scale / batch | updates | best split | adaptive / best | worst seed | choices |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2) as pool:
        worlds = {**WORLDS, RECORDED: "", CHANGE: CHANGES.get(workers, CHANGES[8])}
        for world, latency in worlds.items():
            if only is not None and only not in world:
                continue
            if world == RECORDED:
                latency = record(Path(folder))
            rows = list(compared(world, latency, workers, seeds, pool))
            if out is not None:
                keep(rows, out)
            for row in rows:
                ratio = "noise dominates" if row.ratio is None else f"{row.ratio:g}"
                split = f"{row.best}+{workers - row.best}"
                found = f"{row.mean:.3f} | {row.worst:.3f} | {row.choices}"
                print(f"| {world} | {ratio} | {row.updates} | {split} | {found} |", flush=True)


def local(repeats: int, updates: int) -> None:
    """Real processes: gradients applied a second, in turns, so that a noisy machine is noisy for all."""
    policies: dict[str, quorate.Policy] = {f"{k}+{8 - k}": quorate.BackupSync(k, 8 - k) for k in range(4, 9)}
    policies["adaptive"] = quorate.AdaptiveBackup(noise_scale=1e9)  # noise dominates: every gradient counts the same
    rates: dict[str, list[float]] = {name: [] for name in policies}
    for repeat in range(repeats):
        for name, policy in policies.items():
            watch = Progress()
            engine = quorate.Local(8, latency=LOCAL_DELAYS)
            quorate.train(
                "digits", policy, engine, updates=updates, seed=repeat, evaluate_every=10**6, recorders=(watch,)
            )
            rates[name].append(watch.a_second(updates, None))
            if name == "adaptive":
                print("\n".join(watch.choices), file=sys.stderr)
    best = max((name for name in rates if name != "adaptive"), key=lambda name: statistics.median(rates[name]))
    print("| policy | gradients/s over the best split's, median | single runs |")
    print("|---|---|---|")
    for name, found in rates.items():
        quotients = [mine / theirs for mine, theirs in zip(found, rates[best], strict=True)]
        singles = ", ".join(f"{value:.3f}" for value in quotients)
        print(f"| {name} | {statistics.median(quotients):.3f} | {singles} |")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--workers", type=int, default=8)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--world", help="only worlds whose name holds this")
    arguments.add_argument("--out", type=Path, metavar="FILE", help="put the figures of all runs into this JSON file")
    arguments.add_argument("--local", action="store_true")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--updates", type=int, default=400, help="of each local run")
    given = arguments.parse_args()
    if given.local:
        local(given.repeats, given.updates)
    else:
        simulated(given.workers, given.seeds, given.world, given.out)


if __name__ == "__main__":
    main()
