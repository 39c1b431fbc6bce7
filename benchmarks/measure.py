"""python -m benchmarks.measure [--device cuda] [--quick] [--json]: what `quorate.measure` costs, and is it right?

Cost: two equal training loops take turns, one of them measured, in one process, and in one and two under DDP (gloo).
Given are the median ratio of a block with it to its neighbour without, and the ratio of the first deciles: what else
runs on a machine only ever adds time, so the quick blocks are those that it disturbed least.

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


class Loop:
    """A plain training loop, as DDP scripts have it."""

    def __init__(self, size: str, device: torch.device) -> None:
        torch.manual_seed(0)
        net = mlp(size).to(device)
        self.model = DistributedDataParallel(net) if dist.is_initialized() else net
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._x, self._y = torch.randn(16, 64, device=device), torch.randint(10, (16,), device=device)
        self._device = device

    def seconds(self, steps: int) -> float:
        """A step's, over a block of them."""
        wait(self._device)
        start = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self._x), self._y).backward()
            self._optimizer.step()
        wait(self._device)
        return (time.perf_counter() - start) / steps


def cost(size: str, device: torch.device, pairs: int, folder: Path, control: bool = False) -> dict[str, Any]:
    """Two loops take turns, block by block; first one of them is measured, then the other (as a control: neither)."""
    loops = Loop(size, device), Loop(size, device)
    first = max(loop.seconds(20) for loop in loops)
    steps = max(1, int(0.004 / first))  # short: the shorter a block, the more of them nothing else disturbs
    if dist.is_initialized():  # all must make the same number of steps
        agreed = torch.tensor(steps)
        dist.broadcast(agreed, 0)
        steps = int(agreed)
    without: list[float] = []
    with_it: list[float] = []
    for half in range(2):
        measured, plain = loops[half], loops[1 - half]
        with nullcontext() if control else quorate.measure(folder / "cost.csv", measured.model, overwrite=True):
            measured.seconds(20)  # by then it is known which gradient is the last
            for number in range(pairs // 2):
                for is_measured in (number % 2 == 0, number % 2 == 1):
                    (with_it if is_measured else without).append((measured if is_measured else plain).seconds(steps))

    def tenth(values: list[float]) -> float:
        return sorted(values)[len(values) // 10]

    return {
        "parameters": size,
        "control": control,
        "processes": f"{dist.get_world_size()}, DDP" if dist.is_initialized() else "1",
        "step_ms": 1e3 * tenth(without),
        "ratio": median(a / b for a, b in zip(with_it, without, strict=True)),
        "undisturbed": tenth(with_it) / tenth(without),
        "more_us": 1e6 * (tenth(with_it) - tenth(without)),
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
    rows = [cost(size, device, pairs, folder, control) for size in WIDTHS for control in (False, True)]
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
    device, pairs = torch.device(arguments.device), 100 if arguments.quick else 600
    if device.type == "cuda":
        device = torch.device("cuda", 0)
    if "BENCHMARK_RANK" in os.environ:
        as_one_of_two(arguments, Path(os.environ["BENCHMARK_FOLDER"]), device, pairs)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [cost(size, device, pairs, Path(folder), control) for size in WIDTHS for control in (False, True)]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rows += [cost(size, device, pairs, Path(folder), control) for size in WIDTHS for control in (False, True)]
        dist.destroy_process_group()
        rows += in_two_processes(arguments, Path(folder))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"with over without, {pairs} pairs of blocks")
    print(f"{'parameters':>10} {'processes':>9} {'step, ms':>9} {'median':>8} {'undisturbed':>12} {'µs a step':>10}")
    for row in rows:
        if "ratio" in row:
            print(
                f"{row['parameters']:>10} {row['processes']:>9} {row['step_ms']:>9.3f} {row['ratio']:>8.4f}"
                f" {row['undisturbed']:>12.4f} {row['more_us']:>10.1f}{'   control: none measured' * row['control']}"
            )
    print("\nmedian ms of a step, of the first and the second process, which has the extra work")
    print(f"{'extra work':>10} {'measured':>20} {'truth':>20} {'whole step':>20}")
    for row in rows:
        if "ratio" not in row:
            cells = [" ".join(f"{ms:.3f}" for ms in row[name]) for name in ("measured_ms", "truth_ms", "whole_step_ms")]
            print(f"{row['extra work']:>10} " + " ".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
