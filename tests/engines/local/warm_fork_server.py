"""A template that need not import torch first: forked from a process that has. Everything after its start is real.

Most of a short run is that import. The tests that are about faults, not about starting, do without it.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import subprocess
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from quorate.engines.local import fork_server


class WarmTemplate:
    """Stands in for subprocess.Popen where the pool starts its template."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: dict[str, str],
        stdin: int,
        stdout: int,
        start_new_session: bool,
    ) -> None:
        assert start_new_session and stdin == subprocess.DEVNULL
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            # What this process has open is closed, and the numbers are given to others: nobody may write to them or
            # close them once more, neither pytest's handler of crashes nor what the collector would find.
            faulthandler.disable()
            gc.freeze()
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.dup2(stdout, 1)
            kept = {0, 1, 2, *pass_fds}
            for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
                if number not in kept:
                    try:
                        os.close(number)
                    except OSError:
                        continue
            os.environ.update(env)
            fork_server.main(*pass_fds)
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("template", timeout)
            time.sleep(0.001)
        return code

    def kill(self) -> None:
        os.kill(self.pid, 9)


#: Replaces the module `subprocess` in quorate.engines.local.fork_server.
WARM: Any = SimpleNamespace(Popen=WarmTemplate, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
