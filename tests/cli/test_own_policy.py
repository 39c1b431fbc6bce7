"""A policy in a file of the user's, on the command line: simulated, trained, resumed, compared, reported, watched.

tests/engines/ray/test_own_policy.py runs it on Ray, tests/data_parallel/test_own_policy.py in a torchrun script.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import quorate
from quorate.engines.base import Engine
from quorate.policies import POLICIES
from quorate.user_code import policy_class
from tests.own_policy_run import DECISIONS, OPTIONS, POLICY, as_decisions, check_run, copy_policy, data_of, printed_by


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has the policy's file."""
    copy_policy(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_none_of_quorates() -> None:
    assert policy_class(POLICY)(quorum=2).name not in POLICIES


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("command", [("simulate", "--latency", "shifted-exp:1,1"), ("train",)], ids=lambda one: one[0])
def test_its_run_is_reported_watched_planned_on_and_replayed(
    folder: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = printed_by(capsys, *command, *OPTIONS, "--updates", 40, "--out", "run")
    assert "warm-up-backup 2/3" in printed
    check_run(folder / "run", capsys)


@pytest.mark.usefixtures("warm")
def test_its_run_goes_on_from_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed_by(capsys, "train", *OPTIONS, "--updates", 20, "--out", "run")
    printed = printed_by(capsys, "train", "--resume", "run", "--updates", 40)
    assert "warm-up-backup 2/3" in printed
    check_run(folder / "run", capsys)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "engine", [quorate.Simulated(3, "shifted-exp:1,1"), quorate.Local(3)], ids=lambda one: one.name
)
def test_a_run_by_function(folder: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    policy = policy_class(POLICY)(quorum=2, warm_up=3)
    quorate.train("digits", policy, engine, updates=40, out="run")
    check_run(folder / "run", capsys)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("engine", ["simulated", "local"])
def test_it_is_compared_with_a_policy_of_quorates(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "--engine", engine, "--policies", f"full-sync,{POLICY}", "--policy-option", "warm_up=3"]
    command += ["--workers", "2+1", "--updates", "12", "--out", "compared"]
    printed_by(capsys, *command)
    printed_by(capsys, "report", "compared", "--out", "both.html")
    runs = data_of(Path("both.html").read_text(encoding="utf-8"))["runs"]
    assert [run["policy"]["name"] for run in runs] == ["full-sync", "warm-up-backup"]
    assert as_decisions(runs[1]["choices"]["changes"]) == DECISIONS
