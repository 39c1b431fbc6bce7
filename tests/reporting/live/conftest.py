"""Traces that grow as a test says, and servers that are closed when it is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quorate.reporting.live.server import Server
from quorate.reporting.live.watcher import Watcher
from quorate.trace import LineRecorder
from tests.browser import browser as browser

HEADER = {
    "quorate": "0.1.0",
    "policy": {"name": "backup", "quorum": 2, "backups": 1, "late": "cancel"},
    "engine": {"name": "local", "latency": None},
    "task": "digits",
    "workers": 3,
    "seed": 7,
    "samples": 64,
    "batch_size": 4,
    "updates": 10,
    "epochs": None,
    "until": None,
    "evaluate_every": 1,
    "parameter_bytes": 1000,
}


class GrowingTrace(LineRecorder):
    """A trace that is written at once, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


@pytest.fixture
def trace(tmp_path: Path) -> GrowingTrace:
    return GrowingTrace(tmp_path / "run" / "trace.jsonl")


@contextmanager
def served(run: Path) -> Iterator[Server]:
    """The page of a run, served by a thread."""
    with Watcher(run) as watcher, Server(watcher) as server:
        thread = threading.Thread(target=server.run, name="serving")
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()
