"""Is the planner right? Plan from the run of one configuration, then really run every split.

    python -m benchmarks.planning [--updates 10000] [--seeds 3] [--local] [--only WORLD]

For each world: how far the predicted seconds per update are from what ran (worst split, and all of them), and how much
slower the chosen split is than the best one found by running all. Simulated worlds in virtual time; with --local also
real worker processes on the digits task, with and without artificial delays, splits run in turn, repeats interleaved.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

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


def check(name: str, run: Run, seeds: int, configurations: list[quorate.Policy], repeats: int = 1) -> None:
    """One line for each seed and each configuration that the plan is made from."""
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
            say(f"{name}, from {policy.name} {getattr(policy, 'quorum', MACHINES)}/{MACHINES}, seed {seed}", made, real)


def say(name: str, made: Plan, real: list[float]) -> None:
    errors = [split.mean / seconds - 1 for split, seconds in zip(made.splits, real, strict=True)]
    costs = [seconds * split.updates for split, seconds in zip(made.splits, real, strict=True)]
    chosen = made.recommendation.quorum - 1
    worst = max(errors, key=abs)
    print(
        f"{name:<50} worst {worst:+6.1%}  chosen {chosen + 1}+{MACHINES - chosen - 1}, "
        f"{costs[chosen] / min(costs) - 1:.1%} behind the best  all "
        + " ".join(f"{100 * error:+.1f}" for error in errors),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--local", action="store_true", help="also real processes; minutes, on a machine with nothing else to do"
    )
    parser.add_argument("--only", help="one world")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, latency in SIMULATED.items():
        if given.only in (None, name):
            sources: list[quorate.Policy] = [quorate.FullSync(), quorate.BackupSync(6, 2)]
            check(name, simulated(latency, given.updates), given.seeds, sources)
    if given.only in (None, "recorded"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "recorded"
            engine = quorate.Local(MACHINES, latency="shifted-exp:0.02,0.01*pauses:0.04,6")
            quorate.train("digits", quorate.FullSync(), engine, updates=300, out=out)
            check("a recorded local run, played again", simulated(f"trace:{out}", 300), 1, [quorate.FullSync()])
    if given.local:
        for name, delay in DELAYS.items():
            if given.only in (None, name):
                check(name, local(delay, 200), 1, [quorate.FullSync()], repeats=2)


if __name__ == "__main__":
    main()
