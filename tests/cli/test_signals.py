"""Ctrl-C and SIGTERM, sent to the command as a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Quorate

pytestmark = pytest.mark.processes

QUORATE = [sys.executable, "-m", "quorate"]
ENDLESS = ("train", "--task", "tasks.py:Line", "--workers", "2+1", "--updates", "1000000")


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*QUORATE, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it never came to that")


def children_of(process: subprocess.Popen[str]) -> set[int]:
    """The processes below this one: the template, and the workers it made."""
    found: set[int] = set()
    waiting = [process.pid]
    while waiting:
        text = Path(f"/proc/{waiting[0]}/task/{waiting.pop(0)}/children").read_text()
        found |= set(map(int, text.split()))
        waiting += map(int, text.split())
    return found


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}/stat").exists() for pid in pids)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_a_checkpoint_to_go_on_from(
    quorate_command: Quorate, here: Path, number: signal.Signals, status: int
) -> None:
    with start(*ENDLESS, "--checkpoint-every", "5", "--json", cwd=here) as process:
        wait_until(lambda: any((here / "runs" / "001" / "checkpoints").glob("0*")))
        workers = children_of(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ""
    assert len(workers) == 4, "a template and three workers"
    wait_until(lambda: gone(workers))
    sentence = err.splitlines()[-1]
    found = re.fullmatch(
        r"stopped backup 2\+1 after update ([\d,]+) \([\d.]+ s\); the checkpoint of update ([\d,]+) is in 'runs/001'; "
        r"to go on: quorate (train --resume runs/001)",
        sentence,
    )
    assert found is not None, sentence
    assert found[1] == found[2], "nothing is lost"
    made = int(found[1].replace(",", ""))
    end = json.loads((here / "runs" / "001" / "trace.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["version"], end["reason"]) == ("end", made, f"stopped by {number.name}")

    ran = quorate_command(*found[3].split(), "--updates", made + 3, "--json")
    assert ran.json()["updates"] == made + 3
    assert quorate_command("replay", "runs/001", "--json").json()["digest"] == ran.json()["digest"]


def test_a_killed_run_can_be_gone_on_with(quorate_command: Quorate, here: Path) -> None:
    """Nobody asked for checkpoints, and the machine may be lost at any time."""
    with start(*ENDLESS, cwd=here) as process:
        wait_until(lambda: any((here / "runs" / "001" / "checkpoints").glob("0*")))
        process.kill()
        process.communicate(timeout=60)
    ran = quorate_command("train", "--resume", "runs/001", "--updates", 200_000, "--until", "seconds>=0", "--json")
    assert ran.json()["updates"] > 1


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_second_signal_ends_it_at_once(here: Path, number: signal.Signals, status: int) -> None:
    """The update under way takes ten minutes: the first signal would wait for it."""
    trace = here / "run" / "trace.jsonl"
    with start(*ENDLESS, "--latency", "constant:600", "--out", "run", cwd=here) as process:
        wait_until(lambda: trace.exists() and '"event":"start"' in trace.read_text())
        workers = children_of(process)
        process.send_signal(number)
        time.sleep(1)  # two that come before Python looks at the first would count as one
        assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1] == (
        "stopped backup 2+1 before the first update; there is no checkpoint to go on from, "
        "the trace so far is in 'run/trace.jsonl'"
    )
    wait_until(lambda: gone(workers))


def test_sigterm_ends_a_simulation_with_a_sentence_too(here: Path) -> None:
    with start("simulate", "--no-gradients", "--updates", "1000000000", "--out", "run", cwd=here) as process:
        trace = here / "run" / "trace.jsonl"
        wait_until(lambda: trace.exists() and '"apply"' in trace.read_text())
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "")
    assert err.splitlines()[-1].startswith("stopped full-sync 8 at update ")
    assert err.splitlines()[-1].endswith(" s virtual); the trace so far is in 'run/trace.jsonl'")
