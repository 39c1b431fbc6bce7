"""The leak police sees what it should: each kind of thing a test could leave behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Belongings


@contextmanager
def thread() -> Iterator[None]:
    stop = threading.Event()
    left = threading.Thread(target=stop.wait, name="left behind")
    left.start()
    yield
    stop.set()
    left.join()


@contextmanager
def process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.communicate(b"\n")


@contextmanager
def open_file() -> Iterator[None]:
    with Path(__file__).open():
        yield


@contextmanager
def open_socket() -> Iterator[None]:
    with socket.socket() as left:
        left.bind(("127.0.0.1", 0))
        yield


@contextmanager
def shared_memory() -> Iterator[None]:
    block = Path("/dev/shm") / f"quorate-test-{os.getpid()}"
    block.write_bytes(b"x")
    yield
    block.unlink()


@contextmanager
def temporary_file() -> Iterator[None]:
    left = Path(tempfile.gettempdir()) / "left-behind"
    left.write_text("x")
    yield
    left.unlink()


@contextmanager
def file_in_the_repository() -> Iterator[None]:
    left = REPOSITORY / "left-behind"
    left.write_text("x")
    yield
    left.unlink()


@contextmanager
def variable() -> Iterator[None]:
    os.environ["LEFT_BEHIND"] = "1"
    yield
    del os.environ["LEFT_BEHIND"]


@pytest.mark.parametrize(
    ("leave", "kind"),
    [
        (thread, "threads"),
        (process, "processes"),
        (open_file, "files or sockets"),
        (open_socket, "files or sockets"),
        (shared_memory, "shared memory"),
        (temporary_file, "files on disk"),
        (file_in_the_repository, "files on disk"),
        (variable, "environment"),
    ],
)
def test_it_notices(leave: object, kind: str) -> None:
    before = Belongings()
    with leave():  # type: ignore[operator]
        assert kind in Belongings().left_behind(before)
    assert not Belongings().left_behind(before)
