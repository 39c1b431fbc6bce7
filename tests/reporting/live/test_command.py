"""`quorate watch` as a command: in the terminal, with signals, and with what is no run."""

from __future__ import annotations

import builtins
import json
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quorate.cli import main

from .conftest import HEADER, GrowingTrace
from .runs import begin, end, round_of

QUORATE = [sys.executable, "-m", "quorate", "watch"]


def test_a_finished_run_is_printed_in_the_terminal(trace: GrowingTrace, capsys: pytest.CaptureFixture[str]) -> None:
    begin(trace)
    round_of(trace, 0)
    trace.chose(1.0, 1, 3, "two arrive together")
    end(trace, 1)
    assert main(["watch", str(trace.path.parent), "--terminal"]) == 0
    printed = re.sub(r" +\n", "\n", capsys.readouterr().out)
    assert printed.startswith("backup 2+1 on digits, seed 7\n")
    assert "progress            100%, 1 of 10 updates, 1.00 s\n" in printed
    assert "tickets             2 applied, 1 dropped (33.3%), 0 lost\n" in printed
    assert "chosen              quorum 3 at update 1: two arrive together\n" in printed
    assert printed.endswith("the run has ended: limit reached\n")


def test_a_growing_run_is_followed_in_lines_until_it_ends(trace: GrowingTrace) -> None:
    with subprocess.Popen(
        [*QUORATE, str(trace.path), "--terminal", "--wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"waiting for {trace.path}, which is not there yet\n"
        begin(trace)
        round_of(trace, 0, loss=0.75)
        line = process.stdout.readline()
        assert line.startswith("10%, 1 of 10 updates, 1.00 s")
        assert ", loss 0.75, accuracy 0.5, dropped 33.3%" in line
        end(trace, 1)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("the run has ended: limit reached\n")


@pytest.mark.parametrize("options", [[], ["--terminal"]], ids=["page", "terminal"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("runs/01", "there is no run in 'runs/01'; did you mean 'runs/001'? Add --wait"),
        ("runs/01/trace.jsonl", "there is no run in 'runs/01/trace.jsonl'; did you mean 'runs/001'? Add --wait"),
        ("nosuch/folder/at/all", "there is no run in 'nosuch/folder/at/all'; check the path. Add --wait"),
        ("runs", "'runs' is a folder of runs (1); name one of them, such as 'runs/001'"),
        ("empty", "there is no run in 'empty'; check the path. Add --wait"),
    ],
)
def test_a_mistyped_path_is_an_error_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    given: str,
    words: str,
) -> None:
    def waits(*_: object, **__: object) -> None:
        raise AssertionError("it waits for a run that nobody starts")

    begin(GrowingTrace(tmp_path / "runs" / "001" / "trace.jsonl"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quorate.reporting.live.watcher.Watcher.__init__", waits)
    assert main(["watch", given, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("how", "number", "status"), [("--terminal", signal.SIGTERM, 143), ("--no-open", signal.SIGINT, 130)]
)
def test_a_signal_ends_it_with_a_sentence(trace: GrowingTrace, how: str, number: signal.Signals, status: int) -> None:
    begin(trace)
    round_of(trace, 0)
    with subprocess.Popen(
        [*QUORATE, str(trace.path), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if how == "--no-open":
            assert line == f"watching {trace.path}\n"
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{url}state", timeout=30) as answer:  # it serves
                assert json.load(answer)["state"]["updates"] == 1
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (status, "stopped watching; the run itself was not touched\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "is not a quorate trace: its first line is no header; give the folder of a run"),
        (json.dumps({**HEADER, "event": "run", "schema": 77}) + "\n", "has schema 77, but this quorate reads"),
        (json.dumps({**HEADER, "event": "run", "schema": 1}) + "\n{torn\n", "line 2 is not a whole record"),
    ],
)
def test_what_is_no_trace_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    (tmp_path / "trace.jsonl").write_text(content)
    for options in ([], ["--terminal"]):
        assert main(["watch", str(tmp_path), *options]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert words in printed.err
        assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--terminal", "--port", "8080"], "--port is for the page; leave it out with --terminal"),
        (["--terminal", "--no-open"], "--no-open is for the page"),
        (["--port", "0"], "Invalid value for '--port'"),
        (["--port", "99999"], "Invalid value for '--port'"),
        (["--port", "x"], "Invalid value for '--port'"),
        (["another"], "unexpected extra argument"),
    ],
)
def test_wrong_options_get_a_sentence(
    trace: GrowingTrace, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    begin(trace)
    assert main(["watch", str(trace.path), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_missing_library_gets_the_line_to_type(
    trace: GrowingTrace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(trace)
    real = builtins.__import__

    def without_uvicorn(name: str, *rest: Any) -> Any:
        if name == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "quorate.reporting.live.server", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_uvicorn)
    assert main(["watch", str(trace.path), "--no-open"]) == 2
    said = capsys.readouterr().err
    assert "the page needs uvicorn, which is not installed; type: pip install starlette uvicorn" in said


@pytest.mark.parametrize(
    ("how", "module"), [("--terminal", "quorate.cli.terminal_view"), ("--no-open", "quorate.reporting.live.server")]
)
def test_a_signal_that_an_import_would_swallow_is_not_lost(
    trace: GrowingTrace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str, module: str
) -> None:
    """Large libraries try imports and catch everything; a Ctrl-C that comes then would be gone, and the page stay."""
    begin(trace)
    end(trace, 0)
    real, came = builtins.__import__, []

    def with_a_signal(name: str, *rest: Any) -> Any:
        if name == module and not came:
            came.append(name)
            with suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
        return real(name, *rest)

    def no_server(_: object) -> None:
        raise AssertionError("it serves")

    monkeypatch.setattr("quorate.reporting.live.server.Server.run", no_server)
    monkeypatch.setattr(builtins, "__import__", with_a_signal)
    assert main(["watch", str(trace.path), how]) == 130
    assert capsys.readouterr().err == "stopped watching; the run itself was not touched\n"
