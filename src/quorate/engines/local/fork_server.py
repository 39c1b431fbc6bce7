"""The fork server: a process that has imported torch and forks worker processes.

A forked worker starts in milliseconds instead of seconds, so a lost worker is cheap to replace. The fork server
computes nothing, runs no user code and has one thread, which makes forking it safe. `main` and `_ForkServer` run in
that process, `WorkerProcesses` in the main process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quorate.engines.shared import messages
from quorate.errors import QuorateError

PR_SET_PDEATHSIG = 1
#: Seconds that workers may take to end by themselves when the run is over; then they are killed.
GRACE_S = 1.0


def main(control: int, blocks: int, words: int, job: int) -> None:
    """Run the fork server until the main process closes the connection or dies."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server = socket.socket(fileno=control)
    server.set_inheritable(False)
    import torch

    torch.set_num_threads(1)
    import quorate.engines.local.worker
    import quorate.tasks.digits  # noqa: F401

    gc.collect()
    gc.freeze()  # a worker's garbage collector would write to the shared pages, and so copy them
    _ForkServer(server, (blocks, words, job)).serve()


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies (Linux; elsewhere, the closed socket ends it)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _ForkServer:
    def __init__(self, server: socket.socket, descriptors: tuple[int, int, int]) -> None:
        self._server, self._descriptors = server, descriptors
        self._children: set[int] = set()
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        self._report(prepared=True)
        while True:
            ready, _, _ = select.select([self._server.fileno(), self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                for pid, status in self._ended():
                    self._report(ended=pid, status=status)
            if self._server.fileno() in ready:
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._server, 4096, 1)
                except ConnectionError:
                    message = b""
                if not message:
                    self._finish()
                self._fork(json.loads(message)["worker"], descriptors[0])

    def _report(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self._server.send(json.dumps(message).encode())

    def _ended(self) -> list[tuple[int, int]]:
        found = []
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            self._children.discard(pid)
            found.append((pid, os.waitstatus_to_exitcode(status)))
        return found

    def _finish(self) -> None:
        """End all workers, by force after GRACE_S, and then this process."""
        until = time.monotonic() + GRACE_S
        while self._children and time.monotonic() < until:
            if not self._ended():
                time.sleep(0.002)
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        while self._children:
            self._children.discard(os.waitpid(-1, 0)[0])
        os._exit(0)

    def _fork(self, number: int, connection: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(connection)
            self._report(worker=number, pid=0, why=error.strerror)
            return
        if pid:
            os.close(connection)
            self._children.add(pid)
            self._report(worker=number, pid=pid)
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            if os.getppid() != parent:  # it died before end_with_parent()
                os._exit(1)
            self._server.close()
            from quorate.engines.local.worker import work

            status = work(number, socket.socket(fileno=connection), *self._descriptors)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from quorate.engines.local.fork_server import main
main(*map(int, sys.argv[2:]))
"""
#: Set to 1, because these libraries start threads when they are imported.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_START_TIMEOUT_S = 120.0


class WorkerProcesses:
    """Starts worker processes through the fork server, which is restarted if it dies."""

    def __init__(self, blocks: int, words: int, job: int) -> None:
        self._descriptors = blocks, words, job
        self.exits: dict[int, int] = {}  # process -> exit status, negative for a signal
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._server: socket.socket | None = None
        self._prepared = False
        self._launch()

    def _launch(self) -> None:
        """Start the fork server, which needs some seconds to import torch."""
        self.close()
        ours, theirs = messages.pair()
        numbers = (theirs.fileno(), *self._descriptors)
        command = [sys.executable, "-c", _BOOT, json.dumps([str(place) for place in sys.path]), *map(str, numbers)]
        try:
            self._fork_server = subprocess.Popen(
                command,
                pass_fds=numbers,
                env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
                stdin=subprocess.DEVNULL,
                stdout=2,  # output of workers must not mix with the program's own on stdout
                start_new_session=True,  # Ctrl-C is for the main process alone
            )
        finally:
            theirs.close()
        self._server, self._prepared = ours, False

    def start(self, worker: int) -> tuple[socket.socket, int]:
        """Start a process for this worker; returns the connection to it and its process number."""
        for _ in range(3):
            if self._fork_server is None or self._fork_server.poll() is not None:
                self._launch()
            started = self._fork(worker)
            if started is not None:
                return started
            self.close()
        raise QuorateError("worker processes cannot be started: the process that makes them ends again and again")

    def _fork(self, worker: int) -> tuple[socket.socket, int] | None:
        assert self._server is not None
        ours, theirs = messages.pair()
        try:
            if not self._prepared and not self._wait_for("prepared"):
                ours.close()
                return None
            self._prepared = True
            socket.send_fds(self._server, [json.dumps({"worker": worker}).encode()], [theirs.fileno()])
            pid = self._wait_for("pid")
        except (OSError, TimeoutError):
            pid = None
        finally:
            theirs.close()
        if not pid:
            ours.close()
            if pid == 0:
                raise QuorateError("the system starts no more processes here (a limit on processes or memory)")
            return None
        return ours, pid

    def _wait_for(self, key: str) -> int | None:
        """Receive messages of the fork server until one has this key; None if it is gone."""
        assert self._server is not None
        self._server.settimeout(_START_TIMEOUT_S)
        while message := self._receive():
            if key in message:
                return message[key]
        return None

    def exit_status(self, pid: int, wait_s: float = 0.5) -> int | None:
        """The exit status of a process; None if it is unknown after `wait_s`."""
        if pid not in self.exits and self._server is not None:
            self._server.settimeout(wait_s)
            with contextlib.suppress(OSError, TimeoutError):
                while pid not in self.exits and self._receive():
                    pass
        return self.exits.pop(pid, None)

    def _receive(self) -> dict[str, int]:
        """The next message of the fork server, empty if it is gone; notes the exit status of processes."""
        assert self._server is not None
        message: dict[str, int] = json.loads(self._server.recv(4096) or b"{}")
        if "ended" in message:
            self.exits[message["ended"]] = message["status"]
        return message

    def close(self) -> None:
        """End the fork server, which ends all workers."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._fork_server is not None:
            try:
                self._fork_server.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._fork_server.kill()
                self._fork_server.wait()
            self._fork_server = None


def kill(pid: int) -> None:
    """Kill a process, even if it is stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def process_state(pid: int) -> tuple[str, float] | None:
    """The state of a process (R, S, D, T, Z …) and the seconds of CPU it has used; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def how_it_ended(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "ended"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with status {status}"
