"""`quorate` by itself, and libraries that are missing."""

from __future__ import annotations

import importlib.metadata

import pytest

from quorate.reporting import figures

from .conftest import Quorate


def test_version_and_help(quorate_command: Quorate) -> None:
    assert quorate_command("--version").out == f"quorate {importlib.metadata.version('quorate')}\n"
    for arguments in ([], ["--help"], ["-h"]):
        ran = quorate_command(*arguments)
        assert ran.status == 0
        for command in ("train", "simulate", "compare", "replay", "demo"):
            assert command in ran.out
    assert "--no-gradients" in quorate_command("simulate", "--help").out


def test_without_matplotlib_a_figure_is_refused_before_the_runs(
    quorate_command: Quorate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    for arguments in (["compare", "--figure", "x.png"], ["compare", "--out", "out"], ["demo"]):
        ran = quorate_command(*arguments)
        assert ran.status == 1
        assert ran.err == "error: a figure needs matplotlib, which is not installed; type: pip install matplotlib\n"
    arguments = ("--engine", "simulated", "--task", "tasks.py:Line", "--epochs", 1, "--json")
    assert quorate_command("compare", *arguments).status == 0


def test_ctrl_c_before_a_run_is_a_word(quorate_command: Quorate, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quorate.cli.train.parse_workers", interrupt)
    ran = quorate_command("simulate")
    assert (ran.status, ran.out, ran.err) == (130, "", "stopped\n")
