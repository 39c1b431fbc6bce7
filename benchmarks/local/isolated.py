"""Runs a contender's process tree by itself; where allowed, with its own network (loopback only) and processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_LAST_LINES = 5


class RunFailedError(Exception):
    """A contender gave no figures; the text is what it said last."""


@cache
def can_isolate() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


def figures_of(command: list[str], timeout_s: float) -> dict[str, Any]:
    """Run the command to its end and give the JSON line that it printed last."""
    loopback = "ip link set lo up; " if can_isolate() else ""
    # The shell stays, so that there is somebody to collect orphans, and is what the meter counts from.
    shell = ["sh", "-c", f'{loopback}export METER_ROOT=$$; "$@"; exit $?', "sh", *command]
    process = subprocess.Popen(
        [*_NAMESPACES, *shell] if can_isolate() else shell,
        cwd=_ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        out, err = _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RunFailedError(f"not done after {timeout_s:.0f} s\n{_last_lines(err)}") from None
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise RunFailedError(f"exit code {process.returncode}\n{_last_lines(err or out)}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the run's whole session: first politely, so that torchrun can end its workers, which have their own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            return process.communicate(timeout=10)
        except ProcessLookupError:
            return process.communicate()
        except subprocess.TimeoutExpired:
            continue
    return "", ""


def _last_lines(text: str) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-_LAST_LINES:])
