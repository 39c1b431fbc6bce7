"""Where the CPU time of a run on Ray goes: its driver, its actors, Ray's own processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.local.measuring import Meter, Setting, cpu_s_of_processes

# What a process's command line has in it, in lower case, the first that fits. Ray puts an actor's class there.
_ROLES = {
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "log_monitor": "log monitor",
    "agent": "agents",
    "dashboard": "agents",
    "autoscaler": "agents",
    "ray::idle": "idle",
    "parameterserver": "server",
    "shard": "server",
    "evaluator": "evaluator",
    "worker": "workers",
}


class MeterOfRoles(Meter):
    """Adds the CPU milliseconds an update takes in each role."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._before: dict[int, float] = {}
        self._cpu_s: dict[str, float] = {}

    def _snapshot(self) -> Any:
        if not self._before:  # what is done here stays outside the time that is measured
            self._before = cpu_s_of_processes(self._root)
            return super()._snapshot()
        found = super()._snapshot()
        for process, cpu_s in cpu_s_of_processes(self._root).items():
            role = _role(process)
            self._cpu_s[role] = self._cpu_s.get(role, 0.0) + cpu_s - self._before.get(process, 0.0)
        return found

    def print_result(self, loss: float | None = None, **more: Any) -> None:
        by_role = {role: 1e3 * cpu_s / self._setting.updates for role, cpu_s in self._cpu_s.items()}
        super().print_result(loss, cpu_ms_by_role=by_role, **more)


def _role(process: int) -> str:
    if process == os.getpid():
        return "driver"
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").lower()
    except OSError:  # it has ended since
        return "ended"
    return next((role for part, role in _ROLES.items() if part in line), "others")
