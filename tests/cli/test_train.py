"""`quorate train`: real worker processes, and what the command prints and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Quorate

pytestmark = pytest.mark.usefixtures("warm")

LINE = ("train", "--task", "tasks.py:Line", "--epochs", 2)


def header_of(run: Path) -> dict[str, Any]:
    header: dict[str, Any] = json.loads((run / "trace.jsonl").read_text().splitlines()[0])
    return header


def test_a_run_from_end_to_end(quorate_command: Quorate, here: Path) -> None:
    ran = quorate_command(*LINE, "--workers", "2+1", "--out", "run", "--json")
    printed = ran.json()
    assert ran.err.startswith("backup 2+1: starting 3 workers\n")  # progress follows, if it takes long enough
    assert printed.pop("out") == "run"
    assert printed == json.loads((here / "run" / "summary.json").read_text())
    assert printed["policy"] == {"name": "backup", "quorum": 2, "backups": 1, "late": "cancel"}
    assert printed["samples"] == {"applied": 2 * 64, "distinct": 64}
    assert set(printed["evaluation"]) == {"distance"}
    assert header_of(here / "run")["engine"]["name"] == "local"
    assert quorate_command("replay", "run", "--json").json()["digest"] == printed["digest"]
    ran = quorate_command(*LINE, "--out", "run")
    assert ran.status == 2
    assert "'run' already holds a run" in ran.err


def test_without_a_folder_the_next_number_is_taken(quorate_command: Quorate, here: Path) -> None:
    (here / "runs" / "007").mkdir(parents=True)
    (here / "runs" / "notes").mkdir()
    ran = quorate_command(*LINE, "--workers", 2, "--quiet")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "full-sync 2 on tasks.py:Line, seed 0, 2 worker processes, real seconds"
    assert "of real time" in lines[1]
    assert lines[-2].split() == ["files", "runs/008"] and lines[-1] == "next: quorate report runs/008"
    assert sorted(entry.name for entry in (here / "runs").iterdir()) == ["007", "008", "notes"]
    assert json.loads((here / "runs" / "008" / "summary.json").read_text())["digest"] in ran.out


def test_two_commands_at_once_get_two_folders(here: Path) -> None:
    from quorate.cli.run_command import folder_for_run

    with folder_for_run(None) as first, folder_for_run(None) as second:
        assert [str(first), str(second)] == ["runs/001", "runs/002"]
        (first / "trace.jsonl").touch()
    assert [entry.name for entry in (here / "runs").iterdir()] == ["001"], "the other was empty"


def test_options_reach_the_engine_and_the_learner(quorate_command: Quorate, here: Path) -> None:
    place = ("--workers", 2, "--threads", 2, "--wire", "bf16", "--latency", "constant:0.002", "--faults", "lose:1@0.01")
    update = ("--clip-norm", 1, "--ema", 0.9, "--evaluate-every", 3, "--batch-size", 2)
    ran = quorate_command(*LINE, *place, *update, "--policy", "softsync", "--quorum", 1, "--seed", 5, "--out", "run")
    assert ran.status == 0, ran.err
    assert "artificial delays constant:0.002" in ran.out
    header = header_of(here / "run")
    wanted = {"threads": 2, "wire": "bf16", "latency": "constant:0.002", "faults": "lose:1@0.01", "device": "cpu"}
    assert {key: header["engine"][key] for key in wanted} == wanted
    assert header["learning"] == {"clip_norm": 1.0, "ema": 0.9, "delay_compensation": None}
    assert (header["evaluate_every"], header["batch_size"], header["seed"], header["workers"]) == (3, 2, 5, 2)
    assert header["policy"]["quorum"] == 1
    trace = (here / "run" / "trace.jsonl").read_text()
    assert '"event":"lost"' in trace, "the worker was really killed"


def test_a_stream_ends_after_some_updates(quorate_command: Quorate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.cli.run_command.DEFAULT_UPDATES", 4)
    assert quorate_command("train", "--task", "tasks.py:Stream", "--workers", 1, "--json").json()["updates"] == 4


def test_what_a_task_prints_is_not_in_the_json(quorate_command: Quorate) -> None:
    for command in (["train", "--workers", 1, "--updates", 2], ["simulate", "--updates", 2]):
        ran = quorate_command(*command, "--task", "tasks.py:Chatty", "--json", "--quiet")
        assert ran.json()["updates"] == 2
        assert "hello from the task" in ran.err


def test_a_task_that_fails_at_once_shows_the_workers_traceback_and_leaves_nothing(
    quorate_command: Quorate, here: Path
) -> None:
    ran = quorate_command("train", "--task", "tasks.py:Broken", "--workers", 2, "--epochs", 1, "--quiet")
    assert (ran.status, ran.out) == (1, "")
    assert "\nerror: worker " in ran.err and "failed at batch" in ran.err
    assert 'tasks.py", line' in ran.err and "ZeroDivisionError: division by zero" in ran.err
    assert "to go on" not in ran.err, "there is nothing to go on from"
    assert not (here / "runs").exists()


def test_an_error_in_evaluate_leaves_a_checkpoint_and_the_way_on(
    quorate_command: Quorate, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "train", "--task", "tasks.py:Unmeasurable", "--workers", 2, "--epochs", 1, "--evaluate-every", 3
    with pytest.raises(ArithmeticError, match="in evaluate") as failed:
        quorate_command(*arguments, "--quiet")
    assert failed.value.__notes__ == [
        "(a checkpoint of version 3 is in 'runs/001')",
        "to go on: quorate train --resume runs/001",
    ]
    monkeypatch.setenv("MENDED", "yes")
    assert quorate_command("train", "--resume", "runs/001", "--json").json()["samples"]["applied"] == 64


def test_a_task_that_fails_later_leaves_a_checkpoint_and_the_way_on(quorate_command: Quorate, here: Path) -> None:
    ran = quorate_command("train", "--task", "tasks.py:BrokenLater", "--workers", 2, "--epochs", 1, "--quiet")
    assert (ran.status, ran.out) == (1, "")
    assert "a checkpoint of version " in ran.err, "the note of the error"
    assert ran.err.endswith("to go on: quorate train --resume runs/001\n")
    (here / "broken").unlink()
    ran = quorate_command("train", "--resume", "runs/001", "--json")
    assert ran.json()["samples"] == {"applied": 64, "distinct": 64}


def test_too_few_workers_has_status_1(quorate_command: Quorate) -> None:
    ran = quorate_command(
        *("train", "--task", "tasks.py:Line", "--workers", 2, "--latency", "constant:0.05"),
        *("--faults", "lose:1@0.1", "--patience", 0, "--updates", 1000, "--out", "run", "--quiet"),
    )
    assert ran.status == 1
    assert "full-sync needs 2 live workers, but only 1 of 2 are left" in ran.err
    assert ran.err.endswith("to go on: quorate train --resume run\n")
