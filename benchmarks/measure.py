"""python -m benchmarks.measure [--device cuda] [--quick] [--json]: what `quorate.measure` costs, and is it right?

Cost: blocks of the same training loop with and without it take turns, in one process and in two under DDP (gloo); the
figure is the median over pairs of blocks of the ratio of their times (CPU seconds; with a GPU, wall seconds).

Right: two processes under DDP, the second with extra work in every step. What is measured stands beside the truth, the
time that the same work takes in a loop which waits for the device before and after it, and averages gradients by hand.
Needs torch alone; with --device cuda one GPU does, for both processes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import quorate

WIDTHS = {"0.1M": 256, "5M": 2200}
EXTRA = ("none", "device", "host")


def mlp(size: str) -> nn.Module:
    width = WIDTHS[size]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cost(size: str, device: torch.device, pairs: int, folder: Path) -> dict[str, Any]:
    """Seconds with over seconds without, by blocks that take turns."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # the machine may be shared
    torch.manual_seed(0)
    plain = mlp(size).to(device)
    model = DistributedDataParallel(plain) if dist.is_initialized() else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(16, 64, device=device), torch.randint(10, (16,), device=device)

    def block(steps: int, path: Path | None) -> float:
        with nullcontext() if path is None else quorate.measure(path, model, overwrite=True):
            wait(device)
            start = clock()
            for _ in range(steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            wait(device)
            return (clock() - start) / steps

    block(20, None)
    steps = max(40, min(1000, int(0.25 / block(20, None))))
    if dist.is_initialized():  # all must make the same number of steps
        agreed = torch.tensor(steps)
        dist.broadcast(agreed, 0)
        steps = int(agreed)
    ratios, plain_s = [], []
    for number in range(pairs):
        seconds = {}
        for measured in (number % 2 == 0, number % 2 == 1):
            seconds[measured] = block(steps, folder / "cost.csv" if measured else None)
        ratios.append(seconds[True] / seconds[False])
        plain_s.append(seconds[False])
    quarters = sorted(ratios)[pairs // 4], sorted(ratios)[-1 - pairs // 4]
    return {
        "parameters": size,
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "step_ms": 1e3 * median(plain_s),
        "ratio": median(ratios),
        "quartiles": quarters,
        "pairs": pairs,
        "steps": steps,
    }


def extra_work(kind: str, rank: int, device: torch.device, matrix: torch.Tensor) -> None:
    if rank == 1 and kind == "host":
        time.sleep(0.02)
    elif rank == 1 and kind == "device":
        for _ in range(20 if device.type == "cuda" else 4):
            matrix = (matrix @ matrix).clamp(-1, 1)


def right(kind: str, device: torch.device, steps: int, folder: Path) -> dict[str, Any]:
    """Median seconds of a step as measured and in truth, of both processes; and of the whole step, which hides it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp("5M" if device.type == "cuda" else "0.1M").to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
    matrix = torch.rand(4000 if device.type == "cuda" else 500, 4000 if device.type == "cuda" else 500, device=device)

    def work() -> None:
        extra_work(kind, rank, device, matrix)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    def truth() -> list[float]:
        found = []
        start = time.perf_counter()
        for _ in range(steps):
            with model.no_sync():
                work()
            wait(device)
            found.append(time.perf_counter() - start)
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            wait(device)
            start = time.perf_counter()
            optimizer.step()
        return found[3:]

    def measured(path: Path) -> tuple[list[float], float]:
        with quorate.measure(path, model, overwrite=True):
            start = time.perf_counter()
            for _ in range(steps):
                work()
                optimizer.step()
            wait(device)
            whole = (time.perf_counter() - start) / steps
        dist.barrier()
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["worker"]) == rank]
        return [float(row["seconds"]) for row in rows][3:], whole

    ours, theirs, wholes = [], [], []
    for number in range(4):
        theirs += truth()
        dist.barrier()
        seconds, whole = measured(folder / f"{kind}{number}.csv")
        ours += seconds
        wholes.append(whole)
    row = torch.tensor([median(ours), median(theirs), median(wholes)], dtype=torch.float64)
    rows = [torch.zeros_like(row) for _ in range(2)]
    dist.all_gather(rows, row)
    return {
        "extra work": kind,
        "measured_ms": [1e3 * float(one[0]) for one in rows],
        "truth_ms": [1e3 * float(one[1]) for one in rows],
        "whole_step_ms": [1e3 * float(one[2]) for one in rows],
    }


def in_two_processes(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """This file again, twice, with a process group between them."""
    started = []
    for rank in range(2):
        command = [sys.executable, "-m", "benchmarks.measure", *sys.argv[1:]]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "BENCHMARK_RANK": str(rank),
            "BENCHMARK_FOLDER": str(folder),
        }
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("one of the two processes failed")
    rows: list[dict[str, Any]] = json.loads(outputs[0])
    return rows


def as_one_of_two(arguments: argparse.Namespace, folder: Path, device: torch.device, pairs: int) -> None:
    rank = int(os.environ["BENCHMARK_RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rows = [cost(size, device, pairs, folder) for size in WIDTHS]
    rows += [right(kind, device, 12 if arguments.quick else 40, folder) for kind in EXTRA]
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device, pairs = torch.device(arguments.device), 10 if arguments.quick else 80
    if device.type == "cuda":
        device = torch.device("cuda", 0)
    if "BENCHMARK_RANK" in os.environ:
        as_one_of_two(arguments, Path(os.environ["BENCHMARK_FOLDER"]), device, pairs)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [cost(size, device, pairs, Path(folder)) for size in WIDTHS]
        rows += in_two_processes(arguments, Path(folder))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'parameters':>10} {'processes':>9} {'step, ms':>9} {'with / without':>14}   middle half of {pairs} pairs")
    for row in rows:
        if "ratio" in row:
            low, high = row["quartiles"]
            print(
                f"{row['parameters']:>10} {row['processes']:>9} {row['step_ms']:>9.3f} {row['ratio']:>14.4f}"
                f"   {low:.4f} to {high:.4f}"
            )
    print("\nmedian ms of a step, of the first and the second process, which has the extra work")
    print(f"{'extra work':>10} {'measured':>20} {'truth':>20} {'whole step':>20}")
    for row in rows:
        if "ratio" not in row:
            cells = [" ".join(f"{ms:.3f}" for ms in row[name]) for name in ("measured_ms", "truth_ms", "whole_step_ms")]
            print(f"{row['extra work']:>10} " + " ".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
