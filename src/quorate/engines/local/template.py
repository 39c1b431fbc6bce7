"""The template: a process that has imported torch and makes workers by forking itself.

A worker so starts in milliseconds instead of seconds, which is what makes losing one cheap. The template computes
nothing, runs no code of the user and has one thread, so that forking it is safe.
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
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
#: How long workers may take to end by themselves when the run is over.
GRACE_S = 1.0


def main(control: int, blocks: int, words: int, job: int) -> None:
    """Serve the main process until it goes away."""
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
    gc.freeze()  # so that a worker's collector does not touch, and so copy, what all share
    _Template(server, (blocks, words, job)).serve()


def end_with_parent() -> None:
    """Be killed when the parent dies, however it dies (Linux; elsewhere the closed socket tells)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Template:
    def __init__(self, server: socket.socket, descriptors: tuple[int, int, int]) -> None:
        self._server, self._descriptors = server, descriptors
        self._children: set[int] = set()
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        self._say(prepared=True)
        while True:
            ready, _, _ = select.select([self._server.fileno(), self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                for pid, status in self._ended():
                    self._say(ended=pid, status=status)
            if self._server.fileno() in ready:
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._server, 4096, 1)
                except ConnectionError:
                    message = b""
                if not message:
                    self._finish()
                self._fork(json.loads(message)["worker"], descriptors[0])

    def _say(self, **message: Any) -> None:
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
        """The main process has no more use for anyone here."""
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
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(connection)
            self._say(worker=number, pid=0, why=error.strerror)
            return
        if pid:
            os.close(connection)
            self._children.add(pid)
            self._say(worker=number, pid=pid)
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            if os.getppid() != template:  # it died before we could ask
                os._exit(1)
            self._server.close()
            from quorate.engines.local.worker import work

            status = work(number, socket.socket(fileno=connection), *self._descriptors)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
