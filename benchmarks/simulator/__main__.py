"""python -m benchmarks.simulator [--quick] [--json]

One core, contenders interleaved, medians of repeats; CPU seconds, since the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import quorate
from benchmarks.workload import Regression
from quorate.ledger import Ledger

LATENCY = "shifted-exp:0.05,0.025"
POLICIES: dict[str, Callable[[int], quorate.Policy]] = {
    "full-sync": lambda n: quorate.FullSync(),
    "backup 96 %": lambda n: quorate.BackupSync(n * 96 // 100, n - n * 96 // 100),
    "backup 96 %, late work finishes": lambda n: quorate.BackupSync(n * 96 // 100, n - n * 96 // 100, late="finish"),
    "async": lambda n: quorate.Async(),
    "async, staleness <= 2n": lambda n: quorate.Async(max_staleness=2 * n),
    "softsync n/10": lambda n: quorate.SoftSync(n // 10),
    "bounded 3": lambda n: quorate.BoundedStaleness(3),
    "k-batch n": lambda n: quorate.KBatchSync(n),
    "delayed 1": lambda n: quorate.Delayed(1),
    "deadline": lambda n: quorate.Deadline(),
}


def tickets_per_second(policy: quorate.Policy, workers: int, tickets: int, out: Path | None) -> float:
    """CPU rate of a run without gradients."""
    per_update = policy.begin(workers).per_update
    updates = max(2, tickets // max(per_update, 1))
    engine = quorate.Simulated(workers, LATENCY)
    start = time.process_time()
    result = quorate.train(None, policy, engine, updates=updates, out=out)
    seconds = time.process_time() - start
    ended = result.summary["tickets"]
    return float((ended["applied"] + ended["dropped"]) / seconds)


def measured_alone(name: str, workers: int, tickets: int, trace: bool) -> float:
    """The same in a process of its own, as a user's run has: memory that earlier runs left in pieces costs extra."""
    one = json.dumps([name, workers, tickets, trace])
    command = [sys.executable, "-m", "benchmarks.simulator", "--one", one]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rates(tickets: int, repeats: int) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, list[float]]] = {name: {"none": [], "trace": [], "many": []} for name in POLICIES}
    for _ in range(repeats):
        for name, row in rows.items():
            row["none"].append(measured_alone(name, 100, tickets, trace=False))
            row["many"].append(measured_alone(name, 10_000, max(tickets, 200_000), trace=False))
            row["trace"].append(measured_alone(name, 100, tickets, trace=True))
    return [
        {
            "policy": name,
            "tickets_per_s": median(row["none"]),
            "tickets_per_s_with_trace": median(row["trace"]),
            "cost_of_10000_workers_over_100": median(
                few / many for few, many in zip(row["none"], row["many"], strict=True)
            ),
        }
        for name, row in rows.items()
    ]


def bare_loop(task: Regression, updates: int, per_update: int) -> float:
    """CPU seconds of what a PyTorch user writes: the same batches, averaged over a round, one step a round."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    x, y = task.data.tensors
    batches = Ledger(len(x), task.batch_size).order(0).split(task.batch_size)
    params = list(model.parameters())
    place = 0
    start = time.process_time()
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(per_update):
            rows = batches[place % len(batches)]
            place += 1
            task.loss(model, (x.index_select(0, rows), y.index_select(0, rows))).backward()
        if per_update > 1:
            for parameter in params:
                assert parameter.grad is not None
                parameter.grad.div_(per_update)
        optimizer.step()
    return time.process_time() - start


def quorate_loop(task: Regression, policy: quorate.Policy, workers: int, updates: int) -> float:
    engine = quorate.Simulated(workers, LATENCY)
    clock = _Clock()
    quorate.train(task, policy, engine, updates=updates, evaluate_every=10**9, recorders=(clock,))
    return time.process_time() - clock.began


class _Clock(quorate.Recorder):
    """Leaves set-up out, as the bare loop does."""

    def run(self, header: dict[str, Any]) -> None:
        self.began = time.process_time()


def gradient_ratios(repeats: int, seconds: float) -> list[dict[str, Any]]:
    cases = {
        "one worker": (quorate.FullSync(), 1, 1),
        "full-sync, 8 workers": (quorate.FullSync(), 8, 8),
        "backup 96+4, 100 workers": (quorate.BackupSync(96, 4), 100, 96),
        "async, 8 workers": (quorate.Async(), 8, 1),
    }
    found = []
    for size in ("0.1M", "5M"):
        task = Regression(size, samples=96 * 8 * 32)  # whole rounds of 96, of 8 and of 1
        once = bare_loop(task, 3, 1) / 3
        for case, (policy, workers, per_update) in cases.items():
            updates = max(2, round(seconds / once / per_update))
            ratios = []
            for turn in range(repeats + 1):
                bare = bare_loop(task, updates, per_update)
                ours = quorate_loop(task, policy, workers, updates)
                if turn:  # the first pair warms caches
                    ratios.append(ours / bare)
            found.append({"parameters": size, "case": case, "over_bare_loop": median(ratios), "updates": updates})
    return found


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class _Memory(quorate.Recorder):
    """Resident memory after a tenth of the tickets, and at the end."""

    def __init__(self, tickets: int) -> None:
        self._early, self._count = tickets // 10, 0
        self.early_mb = 0.0

    def started(self, time: float, ticket: Any) -> None:
        self._count += 1
        if self._count == self._early:
            self.early_mb = resident_mb()


def memory_growth(tickets: int) -> list[dict[str, Any]]:
    found = []
    for name in ("backup 96 %", "async"):
        policy = POLICIES[name](100)
        memory = _Memory(tickets)
        updates = tickets // policy.begin(100).per_update
        engine = quorate.Simulated(100, LATENCY)
        quorate.train(None, policy, engine, updates=updates, recorders=(memory,))
        late = resident_mb()
        found.append({"policy": name, "tickets": tickets, "growth_mb": late - memory.early_mb, "resident_mb": late})
    return found


def show(report: dict[str, Any]) -> None:
    print("\nTickets per CPU second, without gradients, one core")
    print(f"{'policy':34}{'no trace':>12}{'trace on disk':>15}{'10,000 / 100 workers':>22}")
    for row in report["rates"]:
        print(
            f"{row['policy']:34}{row['tickets_per_s']:12,.0f}{row['tickets_per_s_with_trace']:15,.0f}"
            f"{row['cost_of_10000_workers_over_100']:21.2f}×"
        )
    print("\nWith gradients: CPU time over the bare PyTorch loop on the same batches (32 samples)")
    for row in report["gradients"]:
        print(f"{row['parameters']:>6}  {row['case']:28}{row['over_bare_loop']:8.3f}×")
    print("\nMemory from the first tenth of the tickets to the last")
    for row in report["memory"]:
        print(f"{row['policy']:34}{row['tickets']:12,} tickets {row['growth_mb']:+8.1f} MB of {row['resident_mb']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; noisier")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if arguments.one:
        name, workers, tickets, trace = json.loads(arguments.one)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run" if trace else None
            print(tickets_per_second(POLICIES[name](workers), workers, tickets, out))
        return
    quick = arguments.quick
    report = {
        "rates": rates(50_000 if quick else 300_000, 1 if quick else 3),
        "gradients": gradient_ratios(1 if quick else 5, 0.3 if quick else 3.0),
        "memory": memory_growth(100_000 if quick else 1_000_000),
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


if __name__ == "__main__":
    main()
