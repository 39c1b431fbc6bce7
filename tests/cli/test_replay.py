"""`quorate replay` of what `quorate simulate` recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Quorate


@pytest.mark.parametrize("policy", ["backup", "async", "delayed"])
def test_a_recorded_run_agrees(quorate_command: Quorate, policy: str) -> None:
    command = ("simulate", "--task", "tasks.py:Line", "--workers", "3+1", "--policy", policy)
    recorded = quorate_command(*command, "--out", "run", "--json").json()
    ran = quorate_command("replay", "run")
    assert ran.status == 0
    assert "every decision agreed, and so did every loss" in ran.out
    assert recorded["digest"] in ran.out
    ran = quorate_command("replay", "run/trace.jsonl", "--json")
    assert ran.json()["digest"] == recorded["digest"]
    assert ran.json()["updates"] == recorded["updates"]


def test_decisions_alone_can_be_compared(quorate_command: Quorate) -> None:
    quorate_command("simulate", "--task", "tasks.py:Line", "--workers", "3+1", "--out", "run")
    ran = quorate_command("replay", "run", "--no-gradients")
    assert ran.status == 0
    assert "parameters were not compared" in ran.out
    assert quorate_command("replay", "run", "--no-gradients", "--json").json()["digest"] is None
    quorate_command("simulate", "--no-gradients", "--updates", 20, "--out", "bare")
    assert "parameters were not compared" in quorate_command("replay", "bare").out


def test_a_difference_has_status_1_and_is_shown(quorate_command: Quorate, here: Path) -> None:
    quorate_command("simulate", "--task", "tasks.py:Line", "--out", "run")
    trace = here / "run" / "trace.jsonl"
    lines = trace.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if json.loads(line)["event"] == "apply")
    record = json.loads(lines[place])
    record["loss"] += 1e-3
    lines[place] = json.dumps(record)
    trace.write_text("\n".join(lines) + "\n")
    ran = quorate_command("replay", "run")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: run: the replay differs from the trace at record")
    assert quorate_command("replay", "run", "--no-gradients").status == 0, "the decisions are the same"


def test_another_task_with_other_data_is_refused(quorate_command: Quorate) -> None:
    quorate_command("simulate", "--task", "tasks.py:Line", "--out", "run")
    ran = quorate_command("replay", "run", "--task", "digits")
    assert ran.status == 2
    assert "made with 64 samples, but the task has 1438" in ran.err
