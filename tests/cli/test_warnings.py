"""Warnings: quorate's own are lines for people, those of others stay as they are."""

from __future__ import annotations

import errno
import warnings

import pytest

from quorate import checkpoint
from quorate.cli._warnings import warnings_are_lines

from .conftest import Quorate


def test_a_checkpoint_that_cannot_be_written_is_a_line_and_training_goes_on(
    quorate_command: Quorate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quorate.checkpointing._TracedFolder.save", full)
    arguments = ("--task", "tasks.py:Line", "--workers", 1, "--updates", 3, "--checkpoint-every", 1)
    ran = quorate_command("train", *arguments, "--quiet", "--json")
    assert ran.json()["updates"] == 3
    lines = ran.err.splitlines()
    assert lines and all(
        line.startswith("warning: checkpoint of version ") and "No space left on device; training goes on" in line
        for line in lines
    )


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
