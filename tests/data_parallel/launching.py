"""Real processes for tests: forked from one that has imported torch, so that a launch takes a moment.

`Launcher` starts that one; `launch(script, processes, …)` runs a script file in so many new processes, each with
torchrun's variables and as `__main__`, ending as the interpreter does: with exit handlers and tracebacks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
LONG_S = 60.0  # what takes longer hangs


class Launch:
    """The processes of one script."""

    def __init__(self, launcher: Launcher, pids: list[int], folder: Path) -> None:
        self._launcher, self.pids, self.folder = launcher, pids, folder
        self.codes: list[int | None] = [None] * len(pids)  # exit statuses, negative for signals

    def kill(self, worker: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[worker], number)

    def text(self, worker: int) -> str:
        """What a process has written so far."""
        path = self.folder / f"output{worker}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_line(self, worker: int, line: str) -> None:
        """Until a process has written this."""
        end = time.monotonic() + LONG_S
        while line not in self.text(worker).splitlines():
            assert time.monotonic() < end, f"worker {worker} never wrote {line!r}:\n{self.text(worker)}"
            assert None in self.poll() or line in self.text(worker), f"all have ended:\n{self.text(worker)}"
            time.sleep(0.02)

    def poll(self) -> list[int | None]:
        self._launcher.ask({"poll": True})
        for number, pid in enumerate(self.pids):
            self.codes[number] = self._launcher.ended.get(pid)
        return self.codes

    def wait(self, limit_s: float = LONG_S, but: tuple[int, ...] = ()) -> list[int]:
        """Until all (but these) have ended; their exit statuses. Who is left then is killed, and the test fails."""
        end = time.monotonic() + limit_s
        while None in [code for worker, code in enumerate(self.poll()) if worker not in but]:
            if time.monotonic() > end:
                hang = [worker for worker, code in enumerate(self.codes) if code is None]
                said = "\n".join(f"--- {worker}\n{self.text(worker)[-2000:]}" for worker in range(len(self.pids)))
                self.close()
                raise AssertionError(f"workers {hang} hang\n{said}")
            time.sleep(0.03)
        return [code for code in self.codes if code is not None]

    def close(self) -> None:
        """Leave nothing behind."""
        for pid, code in zip(self.pids, self.poll(), strict=True):
            if code is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while None in self.poll():
            time.sleep(0.02)


class Launcher:
    """The process that all others are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
        )
        self.ended: dict[int, int] = {}

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.ended |= {int(pid): code for pid, code in answer["ended"].items()}
        return answer

    def launch(
        self, script: str, processes: int, folder: Path, *arguments: str, environment: dict[str, str] | None = None
    ) -> Launch:
        order = {
            "script": str(SCRIPTS / script),
            "processes": processes,
            "folder": str(folder),
            "arguments": list(map(str, arguments)),
            "environment": environment or {},
        }
        return Launch(self, self.ask(order)["pids"], folder)

    def ran(self, script: Path, processes: int, folder: Path, *arguments: str) -> str:
        """What the processes of a script for torchrun have written; fails with it where one did not end well."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(processes)}
        launch = self.launch(str(script), processes, folder, *arguments, environment=where)
        codes = launch.wait()
        output = "\n".join(launch.text(worker) for worker in range(processes))
        assert codes == [0] * processes, output
        return output

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def _environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "PYTHONPATH": _paths()}
    return {**os.environ, **quiet}


def _paths() -> str:
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


# ------------------------------------------------------------ in the process that all others are forked from


def _serve() -> dict[str, Any] | None:
    """Fork as told; gives the order in a forked process, and None when there is nothing left to do."""
    import torch
    import torch._dynamo  # the first step of an optimizer imports it, which takes seconds
    import torch.distributed

    import quorate

    torch.set_num_threads(1)
    assert quorate.DataParallel
    alive: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        for worker in range(order.get("processes", 0)):
            pid = os.fork()
            if pid == 0:
                return {**order, "worker": worker}
            pids.append(pid)
        alive |= set(pids)
        ended = {}
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                ended[pid] = os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps({"pids": pids, "ended": ended}) + "\n")
        sys.stdout.flush()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return None


def _become(order: dict[str, Any]) -> None:
    """Set this process up as torchrun would."""
    worker, folder = order["worker"], Path(order["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(folder / f"output{worker}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for old, new in ((0, nothing), (1, output), (2, output)):
        os.dup2(new if old == 0 else output, old)
    os.close(nothing)
    os.close(output)
    os.environ.update(
        RANK=str(worker),
        LOCAL_RANK=str(worker),
        WORLD_SIZE=str(order["processes"]),
        QUORATE_STORE=str(folder / "store"),
    )
    os.environ.update(order["environment"])
    sys.argv = [order["script"], *order["arguments"]]


if __name__ == "__main__":
    told = _serve()
    if told is not None:
        import runpy

        _become(told)
        runpy.run_path(told["script"], run_name="__main__")
