"""How much of a cluster a GPU simulates a minute.

python -m benchmarks.gpu_simulator [TASK …] [--updates N] [--batch N] [--workers N] [--without-bits]

The nets of experiments/inception, pixelcnn and staleness, and a smaller one, on made-up pictures: async and in rounds,
with CUDA graphs and without, and in vmapped calls. Prints, for each, gradients a second, and simulated
worker-hours a device-minute. Also whether graphs change the parameters: they must not, by a single bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from experiments.common.made_up import pictures
from torch.utils.data import TensorDataset

import quorate
from quorate.learner import digest
from quorate.tasks.cifar10 import Cifar10, Cifar10Inception
from quorate.tasks.mnist import Mnist
from quorate.tasks.pixelcnn import PixelCnn

GRAPHS, CALL_BY_CALL, VMAPPED = "CUDA graphs", "call by call", "vmapped"


def run(
    task: quorate.Task, policy: quorate.Policy, workers: int, batch_size: int, updates: int, how: str
) -> tuple[str, str]:
    """One run: a line of figures, and the digest of its parameters."""
    seen: list[tuple[float, float]] = []
    first = updates // 4  # setting up does not count, nor does the evaluation at the end

    class Clock(quorate.Recorder):
        def applied(self, at: float, update: Any) -> None:
            if update.version in (first, updates):
                torch.cuda.synchronize()
                seen.append((time.monotonic(), at))

    began = time.monotonic()
    result = quorate.train(
        task,
        policy,
        quorate.Simulated(
            workers,
            "chen2016",
            device="cuda",
            graphs=how != CALL_BY_CALL,
            together=how == VMAPPED or policy.staleness_bound == 0,  # a round is one batch
        ),
        updates=updates,
        batch_size=batch_size,
        evaluate_every=updates,
        ema=0.999,
        clip_norm=5.0 if isinstance(policy, quorate.Async) else None,
        recorders=(Clock(),),
    )
    whole_s = time.monotonic() - began
    (before, virtual_before), (after, virtual_after) = seen
    took_s, made = after - before, updates - first
    gradients = made * policy.begin(workers).per_update
    hours = workers * (virtual_after - virtual_before) / 3600
    line = (
        f"{gradients / took_s:9.0f} gradients/s  {1e3 * took_s / made:8.2f} ms an update  "
        f"{60 * hours / took_s:8.1f} worker-hours a minute  (whole run {whole_s:.1f} s)"
    )
    return line, digest(result.parameters)


def _digits(samples: int) -> TensorDataset:
    return pictures(samples, channels=1, size=28)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="inception, pixelcnn, mnist, alexnet (default: all)")
    parser.add_argument("--updates", type=int, default=2000, help="of async; rounds are fewer (default: 2000)")
    parser.add_argument("--batch", type=int, default=16, help="samples of a gradient (default: 16)")
    parser.add_argument("--workers", type=int, default=106, help="of async and of rounds (default: 106)")
    parser.add_argument("--without-bits", action="store_true", help="leave out the runs that only compare bits")
    given = parser.parse_args()
    if given.updates < 16 or given.workers < 2 or given.batch < 1:
        parser.error("there must be at least 16 updates, 2 workers and 1 sample")
    if not torch.cuda.is_available():
        print("error: this measures a GPU, and torch sees none here", file=sys.stderr)
        return 2
    data = pictures(50_000), pictures(1000, seed=8)
    tasks: dict[str, Callable[[], quorate.Task]] = {
        "inception": lambda: Cifar10Inception(data, lr=0.002, samples_per_update=given.batch, precision="tf32"),
        "pixelcnn": lambda: PixelCnn(data, lr=1e-4, precision="tf32"),
        "mnist": lambda: Mnist((_digits(60_000), _digits(1000)), lr=0.01, precision="tf32"),
        "alexnet": lambda: Cifar10("alexnet", data, lr=0.002, precision="tf32"),
    }
    backups = max(1, given.workers // 17)  # of 106, 6
    policies: list[tuple[quorate.Policy, int, int]] = [
        (quorate.Async(), given.workers, given.updates),
        (quorate.Delayed(20), 1, given.updates),
        (quorate.SoftSync(4), 16, given.updates // 4),
        (quorate.BackupSync(given.workers - backups, backups), given.workers, max(4, given.updates // 20)),
    ]
    unknown = set(given.tasks) - set(tasks)
    if unknown:
        parser.error(f"there is no task {', '.join(sorted(unknown))}; there are {', '.join(tasks)}")
    ways = (GRAPHS, VMAPPED) if given.without_bits else (GRAPHS, CALL_BY_CALL, GRAPHS, VMAPPED)
    failed = 0
    for name, make in tasks.items():
        if given.tasks and name not in given.tasks:
            continue
        for policy, workers, updates in policies:
            digests = set()
            for how in ways:
                if how == VMAPPED and policy.staleness_bound == 0:
                    continue
                line, bits = run(make(), policy, workers, given.batch, updates, how)
                if how != VMAPPED:  # which rounds otherwise
                    digests.add(bits)
                print(f"{name:10} {policy.name:9} {workers:4} workers {how:13} {line}", flush=True)
            if len(digests) > 1:
                failed = 1
                print(f"{name:10} {policy.name:9} the parameters DIFFER")
    return failed


if __name__ == "__main__":
    sys.exit(main())
