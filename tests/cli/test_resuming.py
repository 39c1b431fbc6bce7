"""`quorate train --resume`: it goes on with the run as it was recorded, and refuses what says otherwise."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import quorate

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
    "--quorum 2": "without --quorum",
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
    from quorate.cli.policy_options import WorkerCounts
    from quorate.cli.train import _same_workers

    assert _same_workers(WorkerCounts(8, 0), WorkerCounts(6, 2), has_backups=False)
    assert not _same_workers(WorkerCounts(5, 3), WorkerCounts(6, 2), has_backups=False)
    assert not _same_workers(WorkerCounts(8, 0), WorkerCounts(6, 2), has_backups=True)


def test_a_run_killed_before_its_first_checkpoint_starts_again(quorate_command: Quorate, here: Path) -> None:
    """Its trace has a header, and perhaps some records: that is enough to start the same run."""
    whole = json.loads(quorate_command(*FIRST, "--json").out)
    shutil.rmtree(here / "run" / "checkpoints")
    trace = here / "run" / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    for kept, half in ((1, ""), (9, ""), (9, '{"event":"arr')):
        trace.write_text("".join(lines[:kept]) + half)
        ran = quorate_command(*RESUME, "--json")
        summary = ran.json()
        assert (summary["updates"], summary["samples"]) == (6, whole["samples"])
        (line,) = ran.err.splitlines()
        assert line.startswith("warning: the run in 'run' was killed before its first checkpoint, so it starts again")
        assert (here / "run" / "trace.jsonl.old").read_text() == "".join(lines[:kept]) + half
        assert quorate_command("replay", "run").status == 0
        shutil.rmtree(here / "run" / "checkpoints")


@pytest.mark.parametrize("left", ["nothing", "an empty trace", "half a header"])
def test_a_restart_killed_before_its_header_starts_again(quorate_command: Quorate, here: Path, left: str) -> None:
    """The first restart had set the old trace aside and not yet written a header of its own."""
    assert quorate_command(*FIRST).status == 0
    shutil.rmtree(here / "run" / "checkpoints")
    trace = here / "run" / "trace.jsonl"
    header = trace.read_text().splitlines(keepends=True)[0]
    (here / "run" / "trace.jsonl.old").write_text(header)
    if left == "nothing":
        trace.unlink()
    else:
        trace.write_text("" if left == "an empty trace" else header[:30])
    ran = quorate_command(*RESUME, "--json")
    assert ran.json()["updates"] == 6 and "so it starts again" in ran.err
    assert quorate_command("replay", "run").status == 0


def test_a_restart_whose_folder_is_deleted_goes_on(here: Path, quorate_command: Quorate) -> None:
    assert quorate_command(*FIRST).status == 0
    shutil.rmtree(here / "run" / "checkpoints")
    trace = here / "run" / "trace.jsonl"
    trace.write_text(trace.read_text().splitlines(keepends=True)[0])

    class Deletes(quorate.Recorder):
        def applied(self, time: float, update: Any) -> None:
            if update.version == 2:
                (here / "run").rename(here / "away")  # at once, also while a checkpoint is written

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert quorate.resume(here / "run", "tasks.py:Line", recorders=(Deletes(),)).metrics.updates == 6
    assert "was deleted during the run; it was made again" in str(told[-1].message)
    assert quorate_command("replay", "run").status == 0


@pytest.mark.parametrize("left", ["nothing", "a folder", "an empty trace", "half a header"])
def test_a_supervisor_that_only_knows_resume_gets_a_run_started(
    quorate_command: Quorate, here: Path, left: str
) -> None:
    """`until quorate train OPTIONS --resume RUN; do :; done` needs no other command for the first start."""
    if left != "nothing":
        (here / "run").mkdir()
    if left in ("an empty trace", "half a header"):
        (here / "run" / "trace.jsonl").write_text("" if left == "an empty trace" else '{"event": "run", "sche')
    ran = quorate_command(*RESUME)
    assert ran.status == 2
    found = "is empty: its run was killed before" if left in ("an empty trace", "half a header") else "does not exist"
    assert found in ran.err and "add the options that it was started with (--task …)" in ran.err
    options = [option for option in FIRST if option not in ("--out", "run")]
    ran = quorate_command(*options, "--resume", "run", "--json")
    assert ran.json()["updates"] == 6 and ran.json()["out"] == "run"
    assert ran.err.startswith("note: trace 'run/trace.jsonl' ") and ran.err.endswith("; the run starts\n")
    assert "has its 6 updates already" in quorate_command(*options, "--resume", "run").err


def test_a_folder_with_an_empty_trace_can_be_used(quorate_command: Quorate, here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "trace.jsonl").touch()
    for command in (["replay"], ["report"], ["plan"], ["watch", "--terminal"], ["watch", "--json"]):
        ran = quorate_command(*command, "run")
        assert ran.status == 2 and "is empty: its run was killed before it recorded anything" in ran.err
    assert quorate_command(*FIRST).status == 0
    (here / "foreign").mkdir()
    (here / "foreign" / "trace.jsonl").write_text("no trace")
    assert "already holds a run" in quorate_command(*FIRST[:-3], "--out", "foreign").err
    assert "is not a quorate trace" in quorate_command("train", "--resume", "foreign", "--updates", 2).err
    assert (here / "foreign" / "trace.jsonl").read_text() == "no trace"
