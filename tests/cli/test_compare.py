"""`quorate compare`: the same task under several policies, and the files it leaves."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from .conftest import Quorate

pytestmark = pytest.mark.usefixtures("warm")

OPTIONS = ("--task", "tasks.py:Line", "--workers", "3+1", "--epochs", 4)
LINE = ("compare", "--engine", "simulated", *OPTIONS)
FOUR = ["full-sync", "backup", "async", "softsync"]
PNG = b"\x89PNG\r\n\x1a\n"


def read_table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "table.csv").read_text().splitlines()))


def test_the_four_policies_side_by_side(quorate_command: Quorate, here: Path) -> None:
    ran = quorate_command(*LINE, "--target", "distance<=0.3", "--json", "--out", "all")
    found = ran.json()
    assert ran.err == ""
    assert found["target"] == "distance<=0.3"
    assert found["engine"] == "simulated"
    assert list(found["runs"]) == FOUR
    for summary in found["runs"].values():
        assert summary["samples"] == {"applied": 4 * 64, "distinct": 64}
        assert 0 < summary["time_to_target"] <= summary["seconds"]
        assert len(summary["digest"]) == 64
    assert found["runs"]["backup"]["policy"] == {"name": "backup", "quorum": 3, "backups": 1, "late": "cancel"}
    assert found["runs"]["softsync"]["policy"]["quorum"] == 3
    assert found.pop("out") == "all" and "that of tasks.py:Line" in found.pop("learning_rates")
    assert json.loads((here / "all" / "summary.json").read_text()) == found
    assert sorted(entry.name for entry in (here / "all").iterdir()) == sorted(
        [*FOUR, "figure.png", "table.csv", "summary.json"]
    )
    assert (here / "all" / "figure.png").read_bytes().startswith(PNG)
    rows = read_table(here / "all")
    assert [row["name"] for row in rows] == FOUR
    assert float(rows[0]["speed_up"]) == 1.0
    for row in rows:
        assert float(row["time_to_target_s"]) == found["runs"][row["name"]]["time_to_target"]
        speed_up = float(rows[0]["time_to_target_s"]) / float(row["time_to_target_s"])
        assert float(row["speed_up"]) == pytest.approx(speed_up)
    assert quorate_command("replay", "all/backup").status == 0


def test_a_policy_in_a_comparison_is_the_same_run_as_alone(quorate_command: Quorate) -> None:
    both = quorate_command(*LINE, "--policies", "backup,async", "--seed", 4, "--json").json()["runs"]
    alone = ("simulate", *OPTIONS, "--seed", 4, "--json", "--policy")
    for policy in ("backup", "async"):
        expected = quorate_command(*alone, policy).json()
        assert expected.pop("out") is None
        assert {key: both[policy][key] for key in expected} == expected


def test_the_table_fits_80_columns_and_says_never(quorate_command: Quorate) -> None:
    ran = quorate_command(*LINE, "--target", "distance<=0", "--figure", "figure.svg")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0] == "4 simulated workers, virtual seconds; latency pause:0.05,0.05,10, seed 0"
    assert len(lines) == 10
    assert all(len(line) <= 80 for line in lines)
    for line, label in zip(lines[3:7], ["full-sync 4", "backup 3+1", "async 4", "softsync 3/4"], strict=True):
        assert line.startswith(label)
        assert "never" in line


def test_options_go_to_the_policies_that_take_them(quorate_command: Quorate) -> None:
    options = ("--late", "finish", "--max-staleness", 5, "--together")
    runs = quorate_command(*LINE, "--json", *options).json()["runs"]
    assert runs["backup"]["policy"]["late"] == "finish"
    assert runs["async"]["policy"]["max_staleness"] == 5
    assert runs["full-sync"]["policy"] == {"name": "full-sync"}


def test_without_gradients_paces_are_compared(quorate_command: Quorate, here: Path) -> None:
    bare = ("compare", "--engine", "simulated", "--no-gradients")
    ran = quorate_command(*bare, "--updates", 200, "--out", "bare")
    assert ran.status == 0
    assert "per s" in ran.out and "virtual" in ran.out and "accuracy" not in ran.out
    rows = read_table(here / "bare")
    assert float(rows[1]["speed_up"]) == pytest.approx(
        float(rows[1]["samples_per_s"]) / float(rows[0]["samples_per_s"])
    )
    assert (here / "bare" / "figure.png").exists(), "the rounds of full-sync can be drawn"
    found = quorate_command(*bare, "--policies", "async,bounded", "--updates", 50, "--json").json()
    assert found["target"] is None
    assert found["runs"]["bounded"]["time_to_target"] is None


def test_a_run_that_breaks_off_stays_in_the_table(quorate_command: Quorate) -> None:
    faults = ("--faults", "lose:0@0.5", "--patience", 1, "--latency", "constant:0.05")
    ran = quorate_command(*LINE, "--target", "distance<=0.001", *faults, "--json")
    assert ran.status == 1
    assert ran.err.startswith("error: full-sync 4: full-sync needs 4 live workers")
    runs = json.loads(ran.out)["runs"]
    assert "needs 4 live workers" in runs["full-sync"]["broke_off"]
    assert runs["full-sync"]["updates"] == 10
    assert runs["backup"]["samples"]["applied"] == 4 * 64
    ran = quorate_command(*LINE, "--target", "distance<=0.001", *faults)
    assert "broke off" in ran.out


def test_a_folder_that_holds_a_comparison_is_left_alone(quorate_command: Quorate, here: Path) -> None:
    (here / "all").mkdir()
    (here / "all" / "table.csv").write_text("mine")
    ran = quorate_command(*LINE, "--out", "all")
    assert ran.status == 2
    assert "already holds a comparison (table.csv)" in ran.err
    assert (here / "all" / "table.csv").read_text() == "mine"
    assert quorate_command(*LINE, "--out", "tasks.py").status == 2


def test_bad_input_found_late_leaves_nothing_half_written(quorate_command: Quorate, here: Path) -> None:
    """Async runs before softsync's round turns out to be larger than an epoch."""
    ran = quorate_command(*LINE, "--policies", "async,softsync", "--quorum", 99, "--out", "all")
    assert ran.status == 2
    assert "takes 99 batches" in ran.err
    assert not (here / "all").exists()


def test_real_processes_are_the_default(quorate_command: Quorate, here: Path) -> None:
    arguments = ("--task", "tasks.py:Line", "--workers", "2+1", "--epochs", 2, "--policies", "full-sync,backup")
    ran = quorate_command("compare", *arguments, "--out", "all")
    assert ran.status == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "3 worker processes, real seconds, seed 0"
    assert "real" in lines[1] and "virtual" not in ran.out
    said = [line for line in ran.err.splitlines() if line.endswith("starting 3 workers")]  # beside lines of progress
    assert said == ["full-sync 3: starting 3 workers", "backup 2+1: starting 3 workers"]
    found = json.loads((here / "all" / "summary.json").read_text())
    assert found["engine"] == "local"
    for summary in found["runs"].values():
        assert summary["samples"] == {"applied": 2 * 64, "distinct": 64}
    assert (here / "all" / "figure.png").read_bytes().startswith(PNG)
    assert quorate_command("replay", "all/backup").status == 0


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--network", "latency=1ms"], "--network latency=1ms was given, but the local engine's workers are real"),
        (["--no-gradients"], "--no-gradients was given, but"),
        (["--no-gradients", "--model-bytes", "10"], "--no-gradients was given, but"),
        (["--together"], "--together was given, but"),
        (["--apart"], "--apart was given, but"),
        (["--faults", "lose:1@1;crash:100,5"], "faults 'lose:1@1;crash:100,5': real workers are killed one by one"),
    ],
)
def test_what_only_the_simulated_engine_knows_is_refused(
    quorate_command: Quorate, option: list[str], sentence: str
) -> None:
    ran = quorate_command("compare", *option)
    assert ran.status == 2
    assert sentence in ran.err
    assert "--engine simulated" in ran.err


def test_what_only_the_local_engine_knows_is_refused(quorate_command: Quorate) -> None:
    ran = quorate_command(*LINE, "--wire", "bf16")
    assert ran.status == 2
    assert "--wire bf16 was given, but simulated gradients are not sent anywhere" in ran.err
    assert "--engine local" in ran.err
