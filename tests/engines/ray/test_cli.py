"""`quorate train --engine ray` from end to end: started, stopped by a signal, gone on with, replayed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quorate.cli import main
from quorate.engines.ray import session
from tests.cli.conftest import TASKS
from tests.engines.ray.processes import descendants

pytestmark = [pytest.mark.timeout(300), pytest.mark.ray]

ENDLESS = ("train", "--engine", "ray", "--task", "tasks.py:Line", "--workers", "1+1", "--updates", "1000000")


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it never came to that")


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}/stat").exists() for pid in pids)


@pytest.mark.ray
def test_a_signal_ends_a_run_that_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "run" / "trace.jsonl"
    command = [sys.executable, "-m", "quorate", *ENDLESS, "--out", "run", "--shards", "2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: process.poll() is not None or (trace.exists() and '"apply"' in trace.read_text()))
        rays = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (143, ""), err
    assert err.startswith("backup 1+1: starting 2 workers on Ray\n")
    found = re.fullmatch(
        r"stopped backup 1\+1 after update ([\d,]+) \([\d.]+ s\); the checkpoint of update \1 is in 'run'; "
        r"to go on: quorate (train --resume run)",
        err.splitlines()[-1],
    )
    assert found is not None, err
    assert len(rays) >= 7, "Ray itself, two workers, two shards and an evaluator"
    wait_until(lambda: gone(rays))
    made = int(found[1].replace(",", ""))
    end = json.loads(trace.read_text().splitlines()[-1])
    assert (end["event"], end["version"], end["reason"]) == ("end", made, "stopped by SIGTERM")

    capsys.readouterr()
    assert main([*found[2].split(), "--updates", str(made + 5)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("backup 1+1: starting 2 workers on Ray\n")
    lines = printed.out.splitlines()
    assert lines[0] == "backup 1+1 on tasks.py:Line, seed 0, 2 workers and 2 shards on Ray, real seconds"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates"] == made + 5
    assert main(["replay", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == summary["digest"]
    assert main(["report", "run", "--no-plan"]) == 0
    assert "ray" in json.loads(trace.read_text().splitlines()[0])["engine"]["name"]


def test_lines_of_a_raylet_about_dead_workers_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    said = [
        "A worker died or was killed while executing a task by an unexpected system error. And …",
        "The disk is full.",
    ]
    session._print({"pid": "raylet", "ip": "127.0.0.1", "lines": said, "is_err": True, "job": "1"})
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "(raylet, ip=127.0.0.1) The disk is full.\n"


def test_a_killed_raylet_ends_the_run_with_a_sentence_and_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may end the process when it is closed then, so the sentence comes before."""
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    command = [sys.executable, "-m", "quorate", *ENDLESS, "--out", "run", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: process.poll() is not None or any(checkpoints.glob("0*[1-9]*")))
        rays = descendants(process.pid)
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in rays}
        (raylet,) = [pid for pid, name in names.items() if name == "raylet"]
        os.kill(raylet, signal.SIGKILL)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "Ray is gone from this machine" in err
    assert "to go on: quorate train --resume run\n" in err
    assert any(checkpoints.glob("0*[1-9]*"))
    wait_until(lambda: gone(rays))
