"""What every script here begins with."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def meet() -> tuple[int, int]:
    """Join the other processes, over a file; gives this worker's number and how many there are."""
    torch.set_num_threads(1)
    worker, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['QUORATE_STORE']}", rank=worker, world_size=workers
    )
    return worker, workers


def say(line: str) -> None:
    """One line of output, at once."""
    os.write(1, f"{line}\n".encode())
