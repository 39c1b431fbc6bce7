"""Warnings: quorate's own are lines for people, those of others stay as they are."""

from __future__ import annotations

import errno
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from quorate import checkpoint
from quorate.cli.signals import warnings_are_lines

from .conftest import Quorate


def test_a_disk_that_is_full_is_one_line_and_where_the_run_is_another(
    quorate_command: Quorate, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.CheckpointFolder.save

    def full(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.folder.is_relative_to("runs"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *arguments, **options)

    monkeypatch.setattr("quorate.checkpoint_schedule._TracedFolder.save", full)
    arguments = ("--task", "tasks.py:Line", "--workers", 1, "--updates", 30, "--checkpoint-every", 1)
    ran = quorate_command("train", *arguments, "--quiet", "--json")
    assert ran.status == 1, "the run is not where it was asked for"
    out = json.loads(ran.out)["out"]
    assert Path(out).parent == here
    first, last = ran.err.splitlines()
    assert first.startswith("warning: checkpoint of version ") and "No space left on device; training goes on" in first
    assert last == (
        f"warning: the folder 'runs/001' cannot be written (No space left on device); the whole run is in {out!r}: "
        f"move it back when that is mended, or go on with it there (quorate train --resume {out})"
    )
    assert quorate_command("train", "--resume", out, "--updates", 33, "--json").json()["updates"] == 33


def test_warnings_of_others_keep_their_form(capsys: pytest.CaptureFixture[str]) -> None:
    usual: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_: usual.append(f"{category.__name__}: {message}")
        with warnings_are_lines():
            warnings.warn("theirs", RuntimeWarning, stacklevel=1)
            warnings.warn_explicit("ours", RuntimeWarning, checkpoint.__file__, 1)
            warnings.warn_explicit("outdated", DeprecationWarning, checkpoint.__file__, 1)
    assert usual == ["RuntimeWarning: theirs", "DeprecationWarning: outdated"]
    assert capsys.readouterr().err == "warning: ours\n"
