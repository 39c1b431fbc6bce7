"""Tests that interrupt a run also work where the shell lets everything ignore interrupts, as after `nohup` and `&`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SAYS_WHETHER = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_an_interrupt_is_heard() -> None:
    """By this process, and by those that it starts."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    child = subprocess.run([sys.executable, "-c", SAYS_WHETHER], capture_output=True, text=True, check=True)
    assert child.stdout == "True\n"


def test_an_interrupt_is_heard_where_the_parent_ignores_it(tmp_path: Path) -> None:
    ignoring = 'trap "" INT HUP; exec "$@"'
    child = [sys.executable, "-c", SAYS_WHETHER]
    plain = subprocess.run(["sh", "-c", ignoring, "sh", *child], capture_output=True, text=True, check=True)
    assert plain.stdout == "False\n", "else this test could not fail"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests += [f"--basetemp={tmp_path / 'inner'}", f"{__file__}::{test_an_interrupt_is_heard.__name__}"]
    command = ["sh", "-c", ignoring, "sh", *tests]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
