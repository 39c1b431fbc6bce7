"""The leak police detects each kind of resource that a test could leave behind."""

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


_USES = """
import mmap, os, sys
if sys.argv[2] == "elsewhere" and os.fork():
    os._exit(0)  # the remaining process has no parent here
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0):
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("whose", ["here", "elsewhere"])
def test_shared_memory_that_others_use_is_not_ours(whose: str) -> None:
    block = Path("/dev/shm") / f"quorate-test-others-{os.getpid()}"
    before = Belongings()
    block.write_bytes(bytes(4096))
    with subprocess.Popen(
        [sys.executable, "-c", _USES, str(block), whose], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdin is not None and user.stdout is not None
        try:
            assert user.stdout.readline() == b"ready\n"
            if whose == "elsewhere":
                user.wait()
            assert ("shared memory" in Belongings().left_behind(before)) is (whose == "here")
        finally:
            block.unlink()
            user.stdin.write(b"\n")
            user.stdin.flush()
            user.stdout.read()  # until it has ended
