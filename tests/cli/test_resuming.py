"""`quorate train --resume`: it goes on with the run as it was recorded, and refuses what says otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import Quorate

pytestmark = pytest.mark.usefixtures("warm")

FIRST = (
    *("train", "--task", "tasks.py:Line", "--workers", "2+1", "--late", "finish", "--latency", "constant:0.001"),
    *("--updates", 6, "--checkpoint-every", 2, "--out", "run", "--quiet"),
)
RESUME = ("train", "--resume", "run", "--quiet")

CONTRADICTIONS = {
    "--policy async": "with --policy backup",
    "--workers 3": "with --workers 2+1",
    "--workers 1+2": "with --workers 2+1",
    "--late cancel": "with --late finish",
    "--k 2": "without --k",
    "--latency constant:0.002": "with --latency constant:0.001",
    "--faults lose:1@1": "without --faults",
    "--device meta": "with --device cpu",
    "--threads 2": "with --threads 1",
    "--wire bf16": "with --wire fp32",
    "--seed 1": "with --seed 0",
    "--batch-size 8": "with --batch-size 4",
    "--clip-norm 1": "without --clip-norm",
    "--evaluate-every 5": "with --evaluate-every 1",
    "--out other": "with --out run",
}


def test_a_run_goes_on_and_contradictions_are_refused(quorate_command: Quorate, here: Path) -> None:
    first = json.loads((quorate_command(*FIRST, "--json")).out)
    assert first["updates"] == 6
    before = (here / "run" / "trace.jsonl").read_bytes()
    for options, recorded in CONTRADICTIONS.items():
        ran = quorate_command(*RESUME, *options.split())
        assert ran.status == 2, options
        shown = options.replace("--clip-norm 1", "--clip-norm 1.0")
        assert ran.err == (
            f"error: {shown} was given, but the run in 'run' was made {recorded}; leave it out, or start a new run\n"
        )
    ran = quorate_command(*RESUME)
    assert ran.status == 2
    assert "has its 6 updates already" in ran.err
    assert (here / "run" / "trace.jsonl").read_bytes() == before

    ran = quorate_command(*FIRST, "--updates", 9, "--resume", "run", "--json")
    summary = ran.json()
    assert (summary["updates"], summary["out"]) == (9, "run")
    assert ran.err == ""
    assert json.loads((here / "run" / "summary.json").read_text())["updates"] == 9
    assert quorate_command("replay", "run", "--json").json()["digest"] == summary["digest"]


def test_a_damaged_checkpoint_is_a_warning_in_one_line(quorate_command: Quorate, here: Path) -> None:
    assert quorate_command(*FIRST).status == 0
    newest = max((here / "run" / "checkpoints").iterdir())
    (newest / "state.json").write_text("{}")
    ran = quorate_command(*RESUME, "--updates", 8, "--json")
    assert ran.json()["updates"] == 8
    (line,) = ran.err.splitlines()
    assert line.startswith(f"warning: checkpoint {newest.name} is damaged (state.json: it has 2 bytes")
    assert re.search(r"; fell back to 0000000[2-5]$", line), "the one before it, however many the disk had time for"


def test_what_has_no_checkpoint_is_refused(quorate_command: Quorate, here: Path) -> None:
    assert quorate_command("simulate", "--task", "tasks.py:Line", "--updates", 2, "--out", "virtual").status == 0
    ran = quorate_command("train", "--resume", "virtual", "--quiet")
    assert (ran.status, ran.err) == (2, "error: the folder 'virtual/checkpoints' holds no checkpoint\n")
    ran = quorate_command("train", "--resume", "nowhere")
    assert ran.status == 2
    assert "'nowhere/trace.jsonl' does not exist" in ran.err or "'nowhere' does not exist" in ran.err


def test_a_number_of_workers_says_nothing_of_a_quorum_where_there_is_none() -> None:
    from quorate.cli._policies import Workers
    from quorate.cli._resuming import _same_workers

    assert _same_workers(Workers(8, 0), Workers(6, 2), "softsync")
    assert not _same_workers(Workers(5, 3), Workers(6, 2), "softsync")
    assert not _same_workers(Workers(8, 0), Workers(6, 2), "backup")
