"""Traces that were changed, torn or made up: every command that reads one answers with a sentence.

A few hundred seeded mutations of real traces go through plan, replay, train --resume, report and watch --terminal.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from quorate.cli import app, main, terminal_view
from quorate.engines.local import fork_server
from tests.engines.local.warm_fork_server import WARM

from .conftest import TASKS

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(300)]

MUTATIONS = 60  # of each run, of which the one with checkpoints gets fewer: to go on takes a second

#: Values that no field expects, or not of this size.
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 7, 1000000, 10**15, 2**63, 10**400, -(10**400), 0.5, -3.5, 1e300, -1e300),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "5", "full-sync", "\ud800", "\x1b[2J", "x" * 5000, "cpu"),
    *([], [1], [None], ["x"], [[]], [10**400], {}, {"name": "x"}, {"name": None}, {"x": {"y": []}}),
]
#: JSON that Python's own encoder would not write.
ODD_TEXTS = [
    "[" * 100_000,
    "[" * 900 + "]" * 900,
    '{"a":' * 900 + "1" + "}" * 900,
    "1" * 5000,
    "1e999",
    '"\\ud800"',
    "nul",
]

RUNS = {
    "backup": "simulate --task tasks.py:Line --workers 3+1 --epochs 1 --faults lose:0@0.1;join:0@0.2",
    "async": "simulate --no-gradients --task tasks.py:Line --policy async --workers 3 --updates 30",
    "deadline": "simulate --task tasks.py:Line --policy deadline --limit 0.06 --workers 3 --updates 8",
    "adaptive": "simulate --task tasks.py:Line --policy adaptive --workers 4 --updates 8",
    "local": "train --task tasks.py:Line --workers 2 --updates 6 --checkpoint-every 2 --quiet",
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs."""
    home = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "subprocess", WARM)
        patch.chdir(home)
        (home / "tasks.py").write_text(TASKS, encoding="utf-8")
        for name, command in RUNS.items():
            assert main([*command.split(), "--out", name]) == 0
    return home


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a record."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [path] * bool(path) + [found for key, item in inside for found in paths_in(item, (*path, key))]


def at(record: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        record = record[key]
    return record


def with_text(record: dict[str, Any], path: tuple[Any, ...], text: str) -> str:
    """A record in which JSON text stands at this place."""
    at(record, path[:-1])[path[-1]] = "HERE"
    return json.dumps(record).replace('"HERE"', text)


def mutated(lines: list[str], draws: random.Random) -> list[str]:
    """One change: of a value, a key, a line or the order of lines. Half of them in the header."""
    lines = list(lines)
    place = 0 if draws.random() < 0.5 else draws.randrange(len(lines))
    kind = draws.choice(
        ["value"] * 5 + ["nudge"] * 3 + ["key", "text", "byte", "line gone", "twice", "swap", "cut", "end"]
    )
    if kind in ("value", "nudge", "key", "text"):
        record = json.loads(lines[place])
        path = draws.choice(paths_in(record))
        if kind == "key":
            del at(record, path[:-1])[path[-1]]
            lines[place] = json.dumps(record)
        else:
            found = at(record, path)
            near = found + draws.choice([-1, 1, 0.001, 3]) if isinstance(found, int | float) else draws.choice(ODD)
            text = json.dumps(near if kind == "nudge" else draws.choice(ODD))
            lines[place] = with_text(record, path, draws.choice(ODD_TEXTS) if kind == "text" else text)
    elif kind == "byte":
        line = bytearray(lines[place].encode())
        line[draws.randrange(len(line))] = draws.randrange(256)
        lines[place] = line.decode("latin-1")
    elif kind == "line gone":
        del lines[place]
    elif kind == "twice":
        lines.insert(draws.randrange(len(lines)), lines[place])
    elif kind == "swap":
        other = draws.randrange(len(lines))
        lines[place], lines[other] = lines[other], lines[place]
    elif kind == "cut":
        lines = lines[: draws.randrange(len(lines))]
    else:
        lines.append(draws.choice(lines))
    return lines


Answers = Callable[[Path], None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answers:
    """Lets all five commands look at a run; none may raise, and what they refuse they refuse in a sentence."""

    def once(watcher: Any, show: Any) -> Any:
        content = watcher.published.content  # a run that has no end would be watched for ever
        show(content)
        if content["state"] is not None:
            terminal_view._view(content)
        return content

    monkeypatch.setattr(terminal_view, "_until_the_end", once)
    command_line = typer.main.get_command(app.app)  # most of a short command is building it
    monkeypatch.setattr(typer.main, "get_command", lambda _: command_line)
    monkeypatch.setattr(app, "tidy", lambda command: command)

    def look(run: Path) -> None:
        commands = [
            ["plan", str(run)],
            ["report", str(run), "--out", str(run / "report.html"), "--overwrite"],
            ["watch", str(run), "--terminal"],
            ["replay", str(run)],
            ["replay", str(run), "--no-gradients"],
        ]
        if (run / "checkpoints").is_dir():
            commands.append(["train", "--resume", str(run), "--updates", "8", "--quiet"])
        for command in commands:
            capsys.readouterr()
            status = main(command)
            printed = capsys.readouterr()
            assert "Traceback" not in printed.err, command
            if status:
                assert status in (1, 2) and printed.err.startswith("error: "), (command, printed.err)
                assert len(printed.err) < 8000 and len(printed.err.splitlines()) <= 4, (command, printed.err)

    return look


@pytest.mark.parametrize("name", RUNS)
def test_changed_traces_are_answered_with_a_sentence(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Answers, name: str
) -> None:
    monkeypatch.chdir(originals)
    lines = (originals / name / "trace.jsonl").read_text(encoding="utf-8").splitlines()
    answers(shutil.copytree(originals / name, tmp_path / "as it was"))
    for number in range(MUTATIONS if name != "local" else MUTATIONS // 2):
        draws = random.Random(f"{name} {number}")
        run = shutil.copytree(originals / name, tmp_path / "run")
        changed = "\n".join(mutated(lines, draws)) + "\n" * (draws.random() < 0.9)
        (run / "trace.jsonl").write_bytes(changed.encode("utf-8", "surrogatepass"))
        try:
            answers(run)
        except BaseException as error:
            error.add_note(f"(it was mutation {number} of {name}, kept in {tmp_path / 'run'})")
            raise
        shutil.rmtree(run)


HEADERS: dict[str, dict[str, Any]] = {
    "a thread for everybody": {"engine": {"name": "local", "threads": 1000000}},
    "no engine": {"engine": None},
    "a list of engines": {"engine": []},
    "a million million workers": {"workers": 10**12},
    "no workers": {"workers": 0},
    "a quorum beyond": {"policy": {"name": "backup", "quorum": 10**9, "backups": 1}},
    "a quorum in words": {"policy": {"name": "backup", "quorum": "two", "backups": []}},
    "a limit in words": {"policy": {"name": "deadline", "limit": "soon"}},
    "a policy nobody knows": {"policy": {"name": "\x1b[31m"}},
    "a policy from nowhere": {"policy": {"name": "own", "source": 5, "source_file": []}},
    "samples beyond": {"samples": 10**17, "batch_size": 1, "epochs": 10**17},
    "bytes beyond": {"parameter_bytes": 2**62},
    "a batch larger than the data": {"batch_size": 10**9},
    "a seed beyond": {"seed": 2**64},
    "a clip in words": {"learning": {"clip_norm": "x"}},
    "a learning of one's own": {"learning": {"momentum": 1}},
    "a decay beyond": {"learning": {"ema": 3}},
    "a device nobody has": {"engine": {"name": "local", "threads": 1, "device": "abacus"}},
    "a device elsewhere": {"engine": {"name": "simulated", "device": "cuda:77", "arithmetic": None}},
    "a latency of another world": {"engine": {"name": "simulated", "latency": "trace:/dev/null"}},
    "until the cows come home": {"until": "cows", "updates": None, "epochs": None},
    "an end without a number": {"updates": "many"},
    "a task of a number": {"task": 7},
    "a task without a class": {"task": "tasks.py"},
    "a task that is a folder": {"task": ".py:Line"},
    "a task with a zero": {"task": "\x00.py:Line"},
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("of", ["backup", "local"])
def test_headers_that_no_run_has(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Answers, name: str, of: str
) -> None:
    monkeypatch.chdir(originals)
    run = shutil.copytree(originals / of, tmp_path / "run")
    first, _, rest = (run / "trace.jsonl").read_text(encoding="utf-8").partition("\n")
    header = json.loads(first)
    for key, value in HEADERS[name].items():
        both = isinstance(value, dict) and isinstance(header.get(key), dict) and key != "policy"
        header[key] = {**header[key], **value} if both else value
    header["task_file"] = None
    (run / "trace.jsonl").write_text(json.dumps(header) + "\n" + rest, encoding="utf-8")
    answers(run)


def test_a_file_that_is_no_text(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Any) -> None:
    monkeypatch.chdir(originals)
    run = shutil.copytree(originals / "local", tmp_path / "run")
    for content in (
        b"",
        b"\n",
        b"\x00" * 100,
        b"\xff\xfe\x00",
        b"{}",
        b"[]\n",
        b"null\n",
        b"\x1f\x8b\x08\x00",
        b"{" * 10**5,
    ):
        (run / "trace.jsonl").write_bytes(content)
        answers(run)
