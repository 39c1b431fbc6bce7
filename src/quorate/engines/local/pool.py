"""The processes of a run, seen from the main process: the template, and how a worker is made and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from quorate.engines.processes import messages
from quorate.errors import QuorateError

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from quorate.engines.local.template import main
main(*map(int, sys.argv[2:]))
"""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # libraries start threads when imported
_TEMPLATE_START_S = 120.0


class Pool:
    """Makes worker processes through a template, which is started again if somebody kills it."""

    def __init__(self, blocks: int, words: int, job: int) -> None:
        self._descriptors = blocks, words, job
        self.exits: dict[int, int] = {}  # process -> exit status, negative for a signal
        self._template: subprocess.Popen[bytes] | None = None
        self._server: socket.socket | None = None
        self._prepared = False
        self._launch()

    def _launch(self) -> None:
        """Start a template; it is ready some time later."""
        self._end_template()
        ours, theirs = messages.pair()
        numbers = (theirs.fileno(), *self._descriptors)
        command = [sys.executable, "-c", _BOOT, json.dumps([str(place) for place in sys.path]), *map(str, numbers)]
        try:
            self._template = subprocess.Popen(
                command,
                pass_fds=numbers,
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
                stdin=subprocess.DEVNULL,
                stdout=2,  # what workers print must not get between the lines of a program's own output
                start_new_session=True,  # Ctrl-C is for the main process alone
            )
        finally:
            theirs.close()
        self._server, self._prepared = ours, False

    def start(self, worker: int) -> tuple[socket.socket, int]:
        """A new process for this worker: our end of the line to it, and its number."""
        for _ in range(3):
            if self._template is None or self._template.poll() is not None:
                self._launch()
            connection = self._fork(worker)
            if connection is not None:
                return connection
            self._end_template()
        raise QuorateError("worker processes cannot be started: the process that makes them ends again and again")

    def _fork(self, worker: int) -> tuple[socket.socket, int] | None:
        assert self._server is not None
        ours, theirs = messages.pair()
        try:
            if not self._prepared and not self._hear("prepared"):
                ours.close()
                return None
            self._prepared = True
            socket.send_fds(self._server, [json.dumps({"worker": worker}).encode()], [theirs.fileno()])
            pid = self._hear("pid")
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

    def _hear(self, key: str) -> int | None:
        """Listen to the template until it says this; None if it is gone."""
        assert self._server is not None
        self._server.settimeout(_TEMPLATE_START_S)
        while packet := self._server.recv(4096):
            message = json.loads(packet)
            if "ended" in message:
                self.exits[message["ended"]] = message["status"]
            if key in message:
                value: int = message[key]
                return value
        return None

    def exit_status(self, pid: int, wait_s: float = 0.5) -> int | None:
        """How a process ended, as far as that is known after a moment."""
        if pid not in self.exits and self._server is not None:
            self._server.settimeout(wait_s)
            with contextlib.suppress(OSError, TimeoutError):
                while pid not in self.exits and (packet := self._server.recv(4096)):
                    message = json.loads(packet)
                    if "ended" in message:
                        self.exits[message["ended"]] = message["status"]
        return self.exits.pop(pid, None)

    def close(self) -> None:
        """End the template, which ends whatever it made."""
        self._end_template()

    def _end_template(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._template is not None:
            try:
                self._template.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._template.kill()
                self._template.wait()
            self._template = None


def kill(pid: int) -> None:
    """End a process at once, also one that is stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def process_state(pid: int) -> tuple[str, float] | None:
    """What the system says a process does (R, S, D, T, Z …) and the seconds of CPU it has used; None if it is gone."""
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
