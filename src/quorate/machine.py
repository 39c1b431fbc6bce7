"""The machine that the workers share: its cores, its load, and how long a process waited for a core."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any


def cores() -> int:
    """Number of cores that this process may use, limited by its CPU affinity and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return count


def machine(workers: int) -> dict[str, Any]:
    """The machine as a trace's header describes it: cores, load before the run, and workers that share it."""
    try:
        load: float | None = round(os.getloadavg()[0], 2)  # of the last minute
    except OSError:
        load = None
    return {"cores": cores(), "load": load, "workers": workers}


def core_wait_s(pid: int | str = "self") -> float | None:
    """Seconds that the main thread of a process was ready to run but had no core; None if the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None


def waited_since(before: dict[int, float], after: dict[int, float]) -> float | None:
    """Seconds that the processes in both readings have waited for a core since `before`; None if there are none."""
    waited = [after[pid] - wait_s for pid, wait_s in before.items() if pid in after]
    return sum(waited) if waited else None
