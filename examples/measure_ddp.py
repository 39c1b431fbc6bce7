"""A DDP script with the two lines that measure it. Run it on a CPU:

    torchrun --nproc-per-node 4 examples/measure_ddp.py
    quorate plan times.csv

It trains a small network on random data, and writes times.csv, or the file that is named. One worker in twenty steps
takes a pause, as real ones do, so that there is something to plan for.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import quorate


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "times.csv"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    with quorate.measure(path, model, overwrite=True):  # ← this line, and the indentation, are all it takes
        for _ in range(200):
            time.sleep(0.05 if torch.rand(()) < 0.05 else 0.005)  # loading a batch
            x, y = torch.randn(32, 64), torch.randint(10, (32,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
