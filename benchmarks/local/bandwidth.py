"""How fast this machine moves memory, and how much of it an update has to move.

python -m benchmarks.local.bandwidth
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch

_COPY_BYTES = 256 << 20  # far more than any cache holds
_SECONDS = 1.5


def bytes_per_update(parameter_bytes: int, workers: int) -> int:
    """What quorate's data plane and the gradients themselves cannot do without, caches aside.

    Each worker reads the parameters twice (forward, backward) and writes its gradient, which is read once for the
    sum; then the old parameters are read and the new ones written.
    """
    of_each_worker = 2 + 1 + 1
    of_the_step = 1 + 1
    return (workers * of_each_worker + of_the_step) * parameter_bytes


def _copy(start: Barrier, pipe: Connection) -> None:
    torch.set_num_threads(1)
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.zeros_like(source)
    start.wait()
    began, copies = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        target.copy_(source)
        copies += 1
    pipe.send(2 * copies * _COPY_BYTES / (time.perf_counter() - began))  # read and written


def main() -> None:
    """One process a core copies large arrays, all at the same time."""
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    start = context.Barrier(cores)
    processes, pipes = [], []
    for _ in range(cores):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_copy, args=(start, theirs)))
        processes[-1].start()
        pipes.append(mine)
    print(json.dumps({"bytes_per_s": sum(pipe.recv() for pipe in pipes), "processes": cores}))
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
