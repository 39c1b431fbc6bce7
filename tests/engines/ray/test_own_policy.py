"""A policy in a file of the user's, on Ray by command; tests/cli/test_own_policy.py has the other engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own_policy_run import OPTIONS, check_run, copy_policy, printed_by

pytestmark = [pytest.mark.timeout(300), pytest.mark.ray]


def test_its_run_goes_on_from_a_checkpoint_and_is_reported_watched_planned_on_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_policy(tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = printed_by(capsys, "train", "--engine", "ray", *OPTIONS, "--updates", 20, "--out", "run")
    assert "warm-up-backup 2/3" in printed
    printed_by(capsys, "train", "--resume", "run", "--updates", 40)
    check_run(tmp_path / "run", capsys)
