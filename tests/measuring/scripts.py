"""DDP training scripts of several processes, started for tests: `python -m tests.measuring.scripts FOLDER`.

All cases run one after the other in the same processes, since starting three of them costs more than all cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import quorate

PROCESSES, STEPS = 3, 6
SLOW_S = 0.3  # what one of the processes sleeps in each step
# Case -> the slow process. DDP sends worker 0's buffers (BatchNorm) before each forward: the others wait for it there.
CASES = {"plain": 1, "norm": 0, "accumulated": 1, "no_sync": 1, "averaged by hand": 1, "compiled": 1}
FAILS, LEAVES = "fails", "leaves"


def train(name: str, path: Path, rank: int) -> None:
    slow, passes = CASES.get(name, 1), 3 if name in ("accumulated", "no_sync") else 1
    middle = nn.BatchNorm1d(32) if name == "norm" else nn.ReLU()
    net = nn.Sequential(nn.Linear(8, 32), middle, nn.Linear(32, 2))
    model: Any = net if name == "averaged by hand" else DistributedDataParallel(net)
    # A quick one and the slow one; each that compiles imports for seconds.
    compiles = name == "compiled" and rank in (0, slow)
    called = torch.compile(model, backend="aot_eager") if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with quorate.measure(path, called, wait_s=1.0 if name == LEAVES else 60.0):
        for _ in range(STEPS):
            for number in range(passes):
                if rank == slow and name in CASES:
                    time.sleep(SLOW_S / passes)  # a batch that is slow to load
                with model.no_sync() if name == "no_sync" and number < passes - 1 else nullcontext():
                    called(torch.randn(16, 8)).square().mean().backward()
            if name == "averaged by hand":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if name == FAILS and rank == 2:
            raise ZeroDivisionError("in the user's script")
        if name == LEAVES and rank == 2:
            os._exit(3)


def run(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """All processes of the scripts; they meet in a file, so that no port can be taken by somebody else."""
    meeting = folder / "store"
    command = [sys.executable, "-m", "tests.measuring.scripts", str(folder)]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
            cwd=Path(__file__).parent.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        done = []
        for process in started:
            out, err = process.communicate(timeout=100)
            done.append(subprocess.CompletedProcess(command, process.returncode, out, err))
        return done
    finally:
        for process in started:
            process.kill()
            process.wait()
        meeting.unlink(missing_ok=True)


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    store: Any = dist.FileStore(str(folder / "store"), PROCESSES)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    for name in (*CASES, FAILS, LEAVES):
        try:
            train(name, folder / name / "times.csv", rank)
        except ZeroDivisionError:
            print(f"{name}: the script's own error came through", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
