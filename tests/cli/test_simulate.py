"""`quorate simulate`: what it prints, and that it runs what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quorate.policies import POLICIES

from .conftest import Quorate

LINE = ("simulate", "--task", "tasks.py:Line", "--json")
QUICK = ("--epochs", 2)


def test_the_json_object_has_the_promised_keys(quorate_command: Quorate) -> None:
    ran = quorate_command(*LINE, *QUICK, "--workers", "3+1")
    summary = ran.json()
    assert ran.err == ""
    assert 11 <= summary["updates"] <= 12, "32 batches, at most 3 an update"
    assert summary["seconds"] > 0
    assert set(summary["update_seconds"]) == {"mean", "median", "p99"}
    assert {"applied", "dropped", "lost"} <= set(summary["tickets"])
    assert summary["samples"] == {"applied": 128, "distinct": 64}
    assert summary["staleness"] == {"mean": 0.0, "max": 0}
    assert {"sent", "used"} <= set(summary["bytes"])
    assert summary["loss"] > 0
    assert set(summary["evaluation"]) == {"distance"}
    assert len(summary["digest"]) == 64


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", ["3+1", "4"])
def test_every_policy_runs_by_name(quorate_command: Quorate, policy: str, workers: str) -> None:
    summary = quorate_command(*LINE, *QUICK, "--policy", policy, "--workers", workers).json()
    assert summary["policy"]["name"] == policy
    assert summary["workers"] == 4
    assert summary["samples"]["applied"] == 128


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        (["--workers", "3+1"], {"name": "backup", "quorum": 3, "backups": 1, "late": "cancel"}),
        (["--workers", "4"], {"name": "full-sync"}),
        (["--workers", "4", "--policy", "backup"], {"name": "backup", "quorum": 4, "backups": 0, "late": "cancel"}),
        (["--workers", "3+1", "--late", "finish"], {"name": "backup", "quorum": 3, "backups": 1, "late": "finish"}),
        (
            ["--workers", "3+1", "--policy", "softsync"],
            {"name": "softsync", "quorum": 3, "staleness_weights": False},
        ),
        (
            ["--workers", "4", "--policy", "softsync", "--quorum", "2", "--staleness-weights"],
            {"name": "softsync", "quorum": 2, "staleness_weights": True},
        ),
        (["--workers", "3+1", "--policy", "k-batch"], {"name": "k-batch", "quorum": 3, "late": "cancel"}),
        (
            ["--workers", "4", "--policy", "k-batch", "--quorum", "6"],
            {"name": "k-batch", "quorum": 6, "late": "cancel"},
        ),
        (["--policy", "bounded"], {"name": "bounded", "bound": 3, "staleness_weights": False}),
        (["--policy", "bounded", "--bound", "0"], {"name": "bounded", "bound": 0, "staleness_weights": False}),
        (["--policy", "delayed"], {"name": "delayed", "delay": 1, "late": "cancel", "warm_up": 0}),
        (
            ["--policy", "delayed", "--delay", "2", "--warm-up", "9"],
            {"name": "delayed", "delay": 2, "late": "cancel", "warm_up": 9},
        ),
        (
            ["--policy", "async", "--max-staleness", "2"],
            {"name": "async", "max_staleness": 2, "staleness_weights": False},
        ),
        (
            ["--policy", "deadline", "--workers", "3+1", "--limit", "0.2", "--min-quorum", "2"],
            {"name": "deadline", "limit": 0.2, "quorum": 3, "min_quorum": 2, "slack": 1.5, "late": "cancel"},
        ),
        (
            ["--policy", "deadline", "--slack", "2"],
            {"name": "deadline", "limit": None, "quorum": None, "min_quorum": None, "slack": 2.0, "late": "cancel"},
        ),
    ],
)
def test_options_reach_the_policy(quorate_command: Quorate, arguments: list[str], policy: dict[str, object]) -> None:
    assert quorate_command(*LINE, *QUICK, *arguments).json()["policy"] == policy


def test_the_same_command_twice_gives_the_same_parameters(quorate_command: Quorate) -> None:
    command = ("simulate", "--json", "--workers", "6+2", "--epochs", 1)
    first = quorate_command(*command).json()
    assert quorate_command(*command).json() == first
    assert quorate_command(*command, "--seed", 1).json()["digest"] != first["digest"]


@pytest.mark.parametrize(
    "options",
    [
        ("--epochs", 1, "--latency", "shifted-exp:0.05,0.02", "--network", "bandwidth=1Mbps", "--faults", "lose:1@1"),
        ("--workers", "3+1", "--late", "finish", "--updates", 5, "--out", "run", "--apart", "--ema", 0.9),
        ("--no-gradients", "--updates", 9, "--model-bytes", 10),
    ],
)
def test_train_on_simulated_workers_is_the_same_run(
    quorate_command: Quorate, here: Path, options: tuple[object, ...]
) -> None:
    line = ("--task", "tasks.py:Line", "--json", *options)
    simulated = quorate_command("simulate", *line).json()
    if "--out" in options:
        (here / "run").rename(here / "first")
    assert quorate_command("train", "--engine", "simulated", *line).json() == simulated
    assert not (here / "runs").exists(), "nothing is saved unless a folder is given"
    if "--out" in options:
        first, second = ((here / name / "trace.jsonl").read_text() for name in ("first", "run"))
        assert first == second


def test_simulated_runs_keep_no_checkpoints(quorate_command: Quorate, here: Path) -> None:
    ran = quorate_command("train", "--engine", "simulated", "--checkpoint-every", 2, "--out", "run")
    assert ran.status == 2
    assert "checkpoint_every is 2, but the simulated engine keeps no checkpoints" in ran.err
    ran = quorate_command("train", "--engine", "simulated", "--wire", "bf16")
    assert (ran.status, "simulated gradients are not sent anywhere" in ran.err) == (2, True)
    assert not (here / "run").exists()


def test_without_gradients_only_times_and_bytes_are_known(quorate_command: Quorate) -> None:
    summary = quorate_command("simulate", "--no-gradients", "--json").json()
    assert summary["updates"] == 1000
    assert summary["digest"] is None and summary["loss"] is None and summary["evaluation"] == {}
    assert summary["samples"]["applied"] == 1000 * 8 * 16, "batches are as large as the task's"
    digits_bytes = 4 * (160 + 4640 + 8256 + 650)
    assert summary["bytes"]["sent"] == 1000 * 8 * 2 * digits_bytes


def test_without_gradients_epochs_are_counted_in_the_data_of_the_task(quorate_command: Quorate) -> None:
    arguments = ("--no-gradients", "--epochs", 2, "--model-bytes", 10, "--workers", 4)
    summary = quorate_command(*LINE, *arguments).json()
    assert summary["samples"] == {"applied": 128, "distinct": 64}
    assert summary["updates"] == 8
    assert summary["bytes"]["sent"] == 8 * 4 * 2 * 10


def test_a_run_without_an_end_takes_twenty_epochs_or_a_thousand_updates_of_a_stream(quorate_command: Quorate) -> None:
    assert quorate_command(*LINE).json()["samples"]["applied"] == 20 * 64
    assert quorate_command("simulate", "--task", "tasks.py:Stream", "--json").json()["updates"] == 1000


def test_until_ends_a_run(quorate_command: Quorate) -> None:
    summary = quorate_command(*LINE, "--until", "distance<=0.2").json()
    assert summary["evaluation"]["distance"] <= 0.2
    assert quorate_command(*LINE, "--until", "seconds>=3").json()["seconds"] >= 3


def test_learning_options_and_network_are_heeded(quorate_command: Quorate, here: Path) -> None:
    options = ("--clip-norm", 1, "--ema", 0.9, "--delay-compensation", 0.1, "--evaluate-every", 3, "--apart")
    links = ("--network", "bandwidth=1Mbps,latency=1ms", "--faults", "lose:1@1;join:1@2", "--threads", 2)
    quorate_command(*LINE, *QUICK, *options, *links, "--batch-size", 2, "--out", "run").json()
    header = json.loads((here / "run" / "trace.jsonl").read_text().splitlines()[0])
    assert header["learning"] == {"clip_norm": 1.0, "ema": 0.9, "delay_compensation": 0.1}
    assert header["evaluate_every"] == 3
    assert header["batch_size"] == 2
    assert header["engine"]["faults"] == "lose:1@1;join:1@2"
    assert "latency=1ms" in header["engine"]["network"]


def test_the_summary_for_people_says_the_same(quorate_command: Quorate, here: Path) -> None:
    ran = quorate_command("simulate", "--task", "tasks.py:Line", *QUICK, "--workers", "3+1", "--out", "run")
    assert ran.status == 0
    assert "backup 3+1 on tasks.py:Line, seed 0, latency pause:0.05,0.05,10" in ran.out
    assert "128 applied, 64 distinct" in ran.out
    assert "distance" in ran.out
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["digest"] in ran.out
    assert all(len(line) <= 80 for line in ran.out.splitlines())


def test_numbers_that_json_has_not_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    from quorate.cli.output import print_json

    print_json({"loss": float("nan"), "inside": [float("inf"), 1.5, {"x": (-float("inf"),)}]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "inside": [None, 1.5, {"x": [None]}]}


def test_step_times_of_a_script_are_a_latency(quorate_command: Quorate, here: Path) -> None:
    rows = [f"{step},{worker},{0.1 * (1 + worker)}\n" for step in range(10) for worker in range(3)]
    (here / "times.csv").write_text("step,worker,seconds\n" + "".join(rows))
    words = ("--latency", "trace:times.csv", "--workers", "2+1", "--no-gradients", "--updates", 5, "--json")
    ran = quorate_command("simulate", *words)
    assert ran.status == 0
    assert json.loads(ran.out)["seconds"] == pytest.approx(1.0)
