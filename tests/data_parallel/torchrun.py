"""Starts a script with torchrun, on loopback, and ends everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def torchrun(
    workers: int, script: Path, *arguments: str, settings: Mapping[str, str] | None = None, timeout_s: float = 100.0
) -> str:
    """What the processes printed; fails with it where one did not end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return launched([*command, str(script), *arguments], settings, timeout_s)


def launched(command: list[str], settings: Mapping[str, str] | None = None, timeout_s: float = 100.0) -> str:
    """What a command that starts processes printed; they are a group, so that none outlives the test."""
    with tempfile.TemporaryDirectory() as folder:  # torchrun leaves its logs
        # No GPU: NCCL refuses several processes on one.
        plain = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        here = {**plain, "TMPDIR": folder, **(settings or {})}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **here},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"not done after {timeout_s:.0f} s:\n{output}") from None
    assert process.returncode == 0, output
    return output
