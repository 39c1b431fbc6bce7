"""Local workers that share one GPU: same numbers as on the CPU, and what an update costs. Torch alone is needed.

PYTHONPATH=src python3 -m benchmarks.local.gpu
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise

import torch

import quorate
from benchmarks.workload import Images, Regression
from quorate.trace import Update

WARM_UP, MEASURED = 10, 60


class _Times(quorate.Recorder):
    def __init__(self) -> None:
        self.at: list[float] = []
        self.losses: list[float] = []

    def applied(self, time: float, update: Update) -> None:
        self.at.append(time)
        self.losses.append(update.loss)

    def update_ms(self) -> float:
        times = self.at[WARM_UP:]
        return statistics.median(b - a for a, b in pairwise(times)) * 1e3


def local(task: object, workers: int, device: str, updates: int, policy: quorate.Policy | None = None) -> _Times:
    times = _Times()
    engine = quorate.Local(workers, device=device)
    quorate.train(task, policy or quorate.FullSync(), engine, updates=updates, evaluate_every=10**9, recorders=(times,))
    return times


def plain_loop_ms(task: object, device: str) -> float:
    """One process, one batch an update, as a person would write it."""
    model = task.model().to(device)  # type: ignore[attr-defined]
    optimizer = task.optimizer(model.parameters())  # type: ignore[attr-defined]
    tensors = [tensor.to(device) for tensor in task.train_data().tensors]  # type: ignore[attr-defined]
    size = task.batch_size  # type: ignore[attr-defined]
    gaps = []
    for step in range(WARM_UP + MEASURED):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = task.loss(model, [tensor[step * size : (step + 1) * size] for tensor in tensors])  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        loss.item()
        gaps.append(time.perf_counter() - started)
    return statistics.median(gaps[WARM_UP:]) * 1e3


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, task in {
        "mlp 0.1M": Regression("0.1M"),
        "mlp 5M": Regression("5M"),
        "images 1.1M": Images(),
        "images 1.1M BatchNorm": Images(norm=True),
        "images 17M": Images(width=256),
    }.items():
        row: dict[str, object] = {"task": name, "plain_loop_ms": round(plain_loop_ms(task, "cuda"), 3)}
        if "17M" not in name:
            on_cpu, on_gpu = local(task, 2, "cpu", 20), local(task, 2, "cuda", 20)
            row["largest_difference_of_losses_cpu_gpu"] = max(
                abs(a - b) / abs(a) for a, b in zip(on_cpu.losses, on_gpu.losses, strict=True)
            )
        for workers in (1, 2, 4, 8):
            row[f"update_ms_{workers}_workers"] = round(local(task, workers, "cuda", WARM_UP + MEASURED).update_ms(), 3)
        policy = quorate.BackupSync(3, 1)
        row["update_ms_3+1"] = round(local(task, 4, "cuda", WARM_UP + MEASURED, policy).update_ms(), 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
