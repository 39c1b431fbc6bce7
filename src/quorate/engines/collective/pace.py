"""How fast the network is, and whether it is the network at all that an all-reduce waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

_PROBE_BYTES, _PROBES = 1 << 20, 5
_TASKS = Path("/proc/self/task")


class Pace(NamedTuple):
    """Of an all-reduce, the same for all processes.

    latency_s: seconds it takes of nothing.
    byte_s: seconds a byte, above that.
    contention: how much of its time this process's threads were kept waiting for a core, 0 to 1. Where that is much,
        an all-reduce takes the time from whatever else the process does: nothing can hide it.
    """

    latency_s: float
    byte_s: float
    contention: float = 0.0


def measure(allreduce: Callable[[Tensor], None], workers: int, device: torch.device) -> Pace:
    """Try it out; `allreduce` adds up a tensor over all workers and returns when that is done."""
    small, large = (torch.zeros(size, device=device) for size in (1, _PROBE_BYTES // 4))
    allreduce(large)  # connections are made and memory is taken the first time
    latencies_s = _seconds_of(allreduce, small)
    before = _waited_for_a_core_s()
    large_s = _seconds_of(allreduce, large)
    contention = min(1.0, (_waited_for_a_core_s() - before) / sum(large_s))
    # The least of some latencies: whatever else a machine does makes them longer, and says nothing of the network.
    means = torch.tensor([min(latencies_s), median(large_s), contention], dtype=torch.float64) / workers
    means = means.to(device)
    allreduce(means)
    latency_s, probe_s, contention = means.tolist()
    return Pace(latency_s, max(0.0, probe_s - latency_s) / _PROBE_BYTES, contention)


def _seconds_of(allreduce: Callable[[Tensor], None], tensor: Tensor) -> list[float]:
    times = []
    for _ in range(_PROBES):
        began = time.monotonic()
        allreduce(tensor)
        tensor.sum().item()  # on a GPU this waits for it
        times.append(time.monotonic() - began)
    return times


def _waited_for_a_core_s() -> float:
    """Seconds that this process's threads were ready to run and did not, in all; 0 where the system does not say."""
    total = 0
    try:
        for thread in _TASKS.iterdir():
            total += int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux, or a thread that has just ended
        return 0.0
    return total / 1e9
