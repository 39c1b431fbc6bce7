"""A policy that is not quorate's decides for real processes of a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quorate
from tests.data_parallel.conftest import WORKERS
from tests.data_parallel.launching import Launcher
from tests.data_parallel.scripts.own_policy import NotFull
from tests.own_policy_run import check_run, copy_policy

pytestmark = pytest.mark.data_parallel


@pytest.fixture(scope="module")
def folder(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    copy_policy(folder)
    launch = launcher.launch("own_policy.py", WORKERS, folder, str(folder))
    assert launch.wait(110) == [0] * WORKERS, "\n".join(launch.text(worker) for worker in range(WORKERS))
    return folder


def seen(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"seen{worker}.json").read_text())[case] for worker in range(WORKERS)]


@pytest.mark.parametrize("case", ["own", "not-full", "by-name"])
def test_all_processes_agree_and_the_trace_replays(folder: Path, case: str) -> None:
    assert len({one["digest"] for one in seen(folder, case)}) == 1
    given = NotFull if case == "not-full" else None  # a class of the script itself is never loaded unasked
    assert quorate.replay(folder / case, policy=given).lines > 12


def test_the_run_of_one_in_a_file_is_reported_watched_planned_on_and_replayed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    check_run(folder / "by-file", capsys, gradients=False)


def test_its_quorums_make_the_updates(folder: Path) -> None:
    sizes = [len(record["tickets"]) for record in quorate.read_trace(folder / "own") if record["event"] == "apply"]
    assert sizes[:3] == [3, 3, 3] and max(sizes[3:]) <= 2
    sizes = [len(record["tickets"]) for record in quorate.read_trace(folder / "not-full") if record["event"] == "apply"]
    assert max(sizes) == 2, "a subclass of FullSync is asked, too"
    header = next(quorate.read_trace(folder / "own"))
    assert header["policy"]["source"] == "tests.own_policies:WarmUpBackup"


def test_one_that_breaks_the_rule_ends_the_run_everywhere(folder: Path) -> None:
    for one in seen(folder, "weighing"):
        assert "policy 'weighing' broke the collective engine's rule at version" in one["error"]
