"""Commands in processes of their own, which end when whoever began them does."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence

#: How long a command has to put its things away before it is killed.
_PATIENCE_S = 20.0


class Children:
    """Commands under way; they may be begun by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False

    def run(self, command: Sequence[str], hear: Callable[[str], None]) -> int | None:
        """Run a command to its end and hear every line it says; its exit status, or None: nothing is begun any more."""
        with self._lock:
            if self._is_over:
                return None
            # A session of its own: Ctrl-C then reaches the first process only, which ends the others once.
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            self._running.add(child)
        try:
            assert child.stdout is not None, "it was asked for"
            with child.stdout:
                for line in child.stdout:
                    hear(line.rstrip("\n"))
            return child.wait()
        finally:
            with self._lock:
                self._running.discard(child)

    def end(self) -> None:
        """Begin nothing more, and end what is under way: kindly at first."""
        with self._lock:
            self._is_over = True
            running = list(self._running)
        for child in running:
            child.terminate()
        for child in running:
            try:
                child.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                child.kill()
