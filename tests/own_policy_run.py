"""What must work with the folder of a run whose policy is a class in a file of the user's, whatever engine ran it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from quorate.cli import main
from quorate.trace import read_trace

#: As on a command line in the folder that `copy_policy` has written to.
POLICY = "own_policies.py:WarmUpBackup"
OPTIONS = ("--policy", POLICY, "--policy-option", "warm_up=3", "--workers", "2+1")
#: Two of three workers make an update, but the first three updates take all: both decisions come with a reason.
DECISIONS = [(0, 3, "warming up or not"), (3, 2, "warming up or not")]


def copy_policy(folder: Path) -> None:
    shutil.copy(Path(__file__).parent / "own_policies.py", folder)


def printed_by(capsys: pytest.CaptureFixture[str], *command: object) -> str:
    """What the command prints on stdout; it must succeed."""
    capsys.readouterr()
    status = main([str(one) for one in command])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return printed.out


def data_of(page: str) -> dict[str, Any]:
    """The data inside the page of a report."""
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def as_decisions(records: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return [(one["version"], one["quorum"], one["reason"]) for one in records]


def check_run(run: Path, capsys: pytest.CaptureFixture[str], *, gradients: bool = True) -> None:
    """The trace has the policy's decisions; report, watch and plan read them from it; a replay makes them again.

    The current folder is the one that has the policy's file, so that `replay` loads that file unasked.
    gradients: the trace is enough to compute them again.
    """
    header, *records = read_trace(run)
    assert (header["policy"]["name"], header["policy"]["warm_up"]) == ("warm-up-backup", 3)
    assert header["policy"]["source"].endswith(POLICY)
    assert as_decisions([one for one in records if one["event"] == "choose"]) == DECISIONS
    sizes = [len(one["tickets"]) for one in records if one["event"] == "apply"]
    assert sizes[:3] == [3, 3, 3] and len(sizes) > 6 and max(sizes[3:]) == 2

    page = run.parent / f"{run.name}.html"
    printed_by(capsys, "report", run, "--out", page)
    data = data_of(page.read_text(encoding="utf-8"))
    (reported,) = data["runs"]
    assert data["title"] == "warm-up-backup 2/3" and reported["policy"] == header["policy"]
    assert reported["choices"]["count"] == len(DECISIONS)
    assert as_decisions(reported["choices"]["changes"]) == DECISIONS

    watched = json.loads(printed_by(capsys, "watch", run, "--json"))["state"]
    assert watched["run"]["policy"] == "warm-up-backup 2/3"
    assert watched["updates"] == len(sizes) and watched["ending"]
    assert sorted(as_decisions(watched["choices"])) == DECISIONS
    assert "warm-up-backup 2/3" in printed_by(capsys, "watch", run, "--terminal")

    assert "3 machines, from trace" in printed_by(capsys, "plan", run)

    replayed = json.loads(printed_by(capsys, "replay", run, "--json"))
    assert replayed["agreed"] and replayed["updates"] == len(sizes) and replayed["gradients"] == gradients
    if gradients:
        assert replayed["digest"] == json.loads((run / "summary.json").read_text())["digest"]
