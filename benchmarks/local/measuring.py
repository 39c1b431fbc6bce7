"""What each contender's process does beside its work: read its setting, meter its updates, print one line."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.local.workload import BATCH, CASES, WIDTHS

UPDATES = {"0.1M": 200, "5M": 100, "25M": 60}
WARMUP = 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Setting:
    """One run of one contender."""

    size: str
    case: str
    workers: int
    quorum: int
    updates: int
    warmup: int

    @property
    def steps(self) -> int:
        """Rounds in all, which is also the most sleeps of a worker."""
        return self.warmup + self.updates

    def flags(self) -> list[str]:
        return [f"--{name}={value}" for name, value in asdict(self).items()]

    @classmethod
    def of_command_line(cls, what: str | None) -> Setting:
        parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--size", choices=WIDTHS, default="0.1M", help="parameters of the net")
        parser.add_argument("--case", choices=CASES, default="a", help="; ".join(f"{k}: {v}" for k, v in CASES.items()))
        parser.add_argument("--workers", type=int, default=8)
        parser.add_argument("--quorum", type=int, default=0, help="gradients of an update (0: all workers)")
        parser.add_argument("--updates", type=int, default=0, help="how many are measured (0: by size)")
        parser.add_argument("--warmup", type=int, default=WARMUP, help="updates before those")
        given = parser.parse_args()
        given.quorum = given.quorum or given.workers
        given.updates = given.updates or UPDATES[given.size]
        if not 1 <= given.quorum <= given.workers or given.updates < 2 or given.warmup < 1:
            parser.error("needs 1 <= quorum <= workers, at least 2 updates and 1 of warmup")
        return cls(**vars(given))


class _Snapshot(NamedTuple):
    tree_s: float  # CPU seconds of this run's processes
    machine_s: float  # CPU seconds of all programs
    steal_s: float  # what the hypervisor gave to others
    time_s: float


class Meter:
    """Notes when each update was made, and the CPU time between the end of the warm-up and the last."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._root = int(os.environ.get("METER_ROOT", os.getpid()))
        self._times: list[float] = []
        self._begin = self._end = _Snapshot(0.0, 0.0, 0.0, 0.0)

    def tick(self) -> bool:
        """To be called right after each update; True once all are measured."""
        self._times.append(time.perf_counter())
        if len(self._times) == self._setting.warmup:
            self._begin = self._snapshot()
            self._times[-1] = self._begin.time_s
        if len(self._times) == self._setting.steps:
            self._end = self._snapshot()
        return len(self._times) >= self._setting.steps

    def print_result(self, loss: float | None = None, **more: Any) -> None:
        """The line that the benchmark reads; the loss is there so that one can see that something was learned."""
        setting = self._setting
        times = self._times[setting.warmup - 1 : setting.steps]
        gaps_ms = [1e3 * (after - before) for before, after in pairwise(times)]
        updates_per_s = setting.updates / (times[-1] - times[0])
        tree_s, machine_s, steal_s, seconds = (end - begin for begin, end in zip(self._begin, self._end, strict=True))
        found = {
            "updates_per_s": updates_per_s,
            "samples_per_s": updates_per_s * setting.quorum * BATCH,
            "update_ms_median": median(gaps_ms),
            "update_ms_p99": quantiles(gaps_ms, n=100, method="inclusive")[-1],
            "cpu_ms_per_update": 1e3 * tree_s / setting.updates,
            "noise_cores": max(0.0, machine_s - tree_s + steal_s) / seconds,
            "loss": loss,
            **more,
        }
        print(json.dumps(found), flush=True)

    def _snapshot(self) -> _Snapshot:
        user, nice, system, _idle, _iowait, irq, softirq, steal = (
            int(ticks) / _TICKS_PER_S for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        tree_s = sum(cpu_s_of_processes(self._root).values())
        return _Snapshot(tree_s, user + nice + system + irq + softirq, steal, time.perf_counter())


def cpu_s_of_processes(root: int) -> dict[int, float]:
    """CPU seconds of a process and of each of its living descendants, by process number."""
    children: dict[int, list[int]] = {}
    cpu_s: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        cpu_s[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    found, todo = {}, [root]
    while todo:
        process = todo.pop()
        found[process] = cpu_s.get(process, 0.0)
        todo += children.get(process, [])
    return found
