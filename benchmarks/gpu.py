"""python -m benchmarks.gpu [--device cuda] [--json]: a round of 100 simulated workers beside one plain batch.

The plain loop takes the same samples as one batch, from data that is on the device already, and reads its loss
after each step, as training loops do. Medians over repeats, contenders interleaved.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils.data import TensorDataset

import quorate
from benchmarks.workload import Images, Regression
from quorate.ledger import Ledger
from quorate.tasks.digits import Digits
from quorate.trace import Update

WORKERS = 100


class WholeRounds(Digits):
    """The digits less a few, so that every round of 100 workers is a whole one."""

    batch_size = 14

    def train_data(self) -> TensorDataset:
        return TensorDataset(*(tensor[:1400] for tensor in super().train_data().tensors))


TASKS: dict[str, Callable[[], Any]] = {
    "digits, 14 samples a worker": WholeRounds,
    "MLP 0.1M, 32 a worker": lambda: Regression("0.1M", samples=12_800),
    "MLP 5M, 32 a worker": lambda: Regression("5M", samples=12_800),
    "conv net 1.1M, 32×32 images, 32 a worker": Images,
    "conv net 4.6M, 32×32 images, 32 a worker": lambda: Images(width=128),
    "the same with BatchNorm": lambda: Images(width=128, norm=True),
}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain(task: Any, batch_size: int, updates: int, device: torch.device, together: int) -> float:
    """Seconds an update of one batch of `together` workers' samples."""
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer = task.optimizer(model.parameters())
    tensors = [tensor.to(device) for tensor in task.train_data().tensors]
    order = Ledger(len(tensors[0]), batch_size).order(0).to(device)
    batches = [rows for rows in torch.split(order, batch_size * together) if len(rows) == batch_size * together]
    start = 0.0
    for update in range(-WARM_UP, updates):
        if update == 0:
            wait(device)
            start = time.perf_counter()
        rows = batches[update % len(batches)]
        batch = [tensor.index_select(0, rows) for tensor in tensors]
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        loss.item()
    wait(device)
    return (time.perf_counter() - start) / updates


class _Clock(quorate.Recorder):
    """Wall time from the end of warm-up to the last update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def applied(self, time_s: float, update: Update) -> None:
        if update.version == WARM_UP:
            wait(self._device)
            self.start = time.perf_counter()

    def ended(self, *rest: Any) -> None:
        wait(self._device)
        self.seconds = time.perf_counter() - self.start


def simulated(task: Any, batch_size: int, updates: int, device: torch.device, together: bool) -> tuple[float, str]:
    clock = _Clock(device)
    result = quorate.train(
        task,
        quorate.FullSync(),
        quorate.Simulated(WORKERS, "shifted-exp:0.05,0.025", device=device, together=together),
        updates=updates + WARM_UP,
        batch_size=batch_size,
        evaluate_every=10**9,
        recorders=(clock,),
    )
    return clock.seconds / updates, result.metrics.header["engine"]["arithmetic"]


WARM_UP = 5


def measure(name: str, device: torch.device, updates: int, repeats: int) -> dict[str, Any]:
    task = TASKS[name]()
    size = task.batch_size
    plain(task, size, 2, device, WORKERS)
    batches, rounds, apart = [], [], []
    for _ in range(repeats):
        batches.append(plain(task, size, updates, device, WORKERS))
        seconds, arithmetic = simulated(task, size, updates, device, together=True)
        rounds.append(seconds)
        apart.append(simulated(task, size, max(2, updates // 10), device, together=False)[0])
    return {
        "task": name,
        "samples": size * WORKERS,
        "plain_batch_ms": median(batches) * 1e3,
        "round_ms": median(rounds) * 1e3,
        "round_over_batch": median(ours / theirs for ours, theirs in zip(rounds, batches, strict=True)),
        "one_by_one_over_batch": median(ours / theirs for ours, theirs in zip(apart, batches, strict=True)),
        "arithmetic": arithmetic,
    }


def same_result_as_cpu(device: torch.device) -> float:
    """Largest difference of test accuracy between device and CPU after 60 updates of every policy on digits."""
    worst = 0.0
    for policy in (quorate.FullSync(), quorate.BackupSync(6, 2), quorate.Async(), quorate.Delayed(1)):
        found = []
        for where in (torch.device("cpu"), device):
            engine = quorate.Simulated(8, "shifted-exp:0.05,0.025", device=where)
            found.append(quorate.train("digits", policy, engine, epochs=6).evaluation["accuracy"])
        worst = max(worst, abs(found[0] - found[1]))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = [measure(name, device, arguments.updates, arguments.repeats) for name in TASKS]
    difference = same_result_as_cpu(device)
    if arguments.json:
        print(json.dumps({"rows": rows, "accuracy_difference": difference, "torch": torch.__version__}, indent=2))
        return
    print(f"{'task':44}{'samples':>8}{'plain ms':>10}{'round ms':>10}{'ratio':>8}{'one by one':>12}")
    for row in rows:
        print(
            f"{row['task']:44}{row['samples']:8}{row['plain_batch_ms']:10.2f}{row['round_ms']:10.2f}"
            f"{row['round_over_batch']:8.2f}{row['one_by_one_over_batch']:12.1f}  {row['arithmetic']}"
        )
    print(f"largest difference of test accuracy to the CPU, digits, four policies: {difference:.4f}")


if __name__ == "__main__":
    main()
