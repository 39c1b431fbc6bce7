"""Progress: cheap, throttled by the wall clock, and never on stdout."""

from __future__ import annotations

import sys

import pytest

from quorate.cli import progress
from quorate.run import Progress

from .conftest import Quorate


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_elsewhere_than_on_a_terminal_there_is_a_line_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    report = progress.reporter(quiet=False)
    assert type(report) is progress.Lines
    with report:
        report.begin("backup 6+2")
        for update in range(1, 1201):
            clock.now += 0.01
            report(Progress(update, update * 0.05, 0.5, 0.25, update / 2400))
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 2, "12 seconds have passed"
    assert lines[0].startswith("backup 6+2: 21%, 50") and lines[0].endswith("loss 0.5, dropped 25%, 0:19 left")
    assert "(100/s)" in lines[0]


def test_short_and_quiet_runs_print_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    for quiet, seconds in ((False, 4), (True, 60)):
        with progress.reporter(quiet) as report:
            report.begin("async 8")
            clock.now += seconds
            report(Progress(1, 1.0, None, 0.0, None))
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_on_stderr(quorate_command: Quorate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    monkeypatch.setattr(progress.Bar, "every_s", 0.0)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    arguments = ("--engine", "simulated", "--task", "tasks.py:Line", "--epochs", 2, "--policies", "backup,async")
    ran = quorate_command("compare", *arguments, "--json")
    assert set(ran.json()["runs"]) == {"backup", "async"}
    for word in ("backup 6+2", "async 8", "updates", "/s", "loss", "drop", "100%"):
        assert word in ran.err


def test_real_workers_are_shown_while_they_start_and_seconds_as_real(
    quorate_command: Quorate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.Bar, "every_s", 0.0)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ran = quorate_command("train", "--task", "tasks.py:Line", "--workers", 2, "--updates", 3, "--json")
    assert ran.json()["updates"] == 3
    assert ran.err.index("starting 2 workers") < ran.err.index("no update yet") < ran.err.index("3 updates")
    assert "m0 s\x1b" in ran.err and "virtual" not in ran.err


def test_the_pace_is_counted_from_the_first_update_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers take a while to start, and a resumed run has a past: neither belongs to the pace."""
    clock = Clock(monkeypatch)
    report = progress.Lines()
    report.begin("full-sync 1", progress.starting(1, "local"))
    clock.now += 4
    report(Progress(1001, 50.0, 0.5, 0.0, 0.5))
    clock.now += 2
    report(Progress(1011, 52.0, 0.5, 0.0, 0.6))
    start, line = capsys.readouterr().err.splitlines()
    assert start == "full-sync 1: starting a worker"
    assert line == "full-sync 1: 60%, 1,011 updates (5/s), 52 s, loss 0.5, dropped 0%, 0:08 left"


def test_an_update_costs_a_look_at_the_clock() -> None:
    """A million updates a second are not held up: nothing is formatted or drawn in between."""
    report = progress.Lines()
    report.begin("async 8")
    shown = Progress(1, 1.0, None, 0.0, None)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    for _ in range(100):
        report(shown)
    sys.setprofile(None)
    assert calls <= 100 * 4 + 1, "a call and a return of the report, and of the clock"


def test_workers_that_are_missing_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two come later, or never; a run that steps back or goes on begins to count again."""
    clock = Clock(monkeypatch)
    report = progress.Lines()
    report.begin("backup 2+2", progress.starting(4, "ray"))
    alive_workers = progress.AliveWorkers(report)
    alive_workers.run({"workers": 4})

    def shown() -> str:
        clock.now += 6
        report(Progress(1, 1.0, None, 0.0, None))
        return capsys.readouterr().err.splitlines()[-1]

    for worker in (0, 1, 1):
        alive_workers.joined(0.0, worker, 0)
    assert shown().endswith("dropped 0%, 2 of 4 workers")
    for worker in (2, 3):
        alive_workers.joined(1.0, worker, 0)
    assert shown().endswith("dropped 0%")
    alive_workers.lost(2.0, 3, ())
    assert shown().endswith("dropped 0%, 3 of 4 workers")
    alive_workers.resumed(2.0, 1, {})
    for worker in (0, 1):
        alive_workers.joined(2.0, worker, 1)
    assert shown().endswith("dropped 0%, 2 of 4 workers")


def test_the_start_says_where_workers_are() -> None:
    assert progress.starting(1, "local") == "starting a worker"
    assert progress.starting(8, "ray") == "starting 8 workers on Ray"
