"""docs/extending.md: its files run as they are, and a user's policy works wherever a built-in policy does."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate.cli import main
from quorate.events import Action, Apply, Cancel, Drop, Start, Ticket
from quorate.reporting.live.state import LiveMetrics
from quorate.trace import feed, read_header, read_trace
from quorate.user_code import policy_class
from tests.own_policies import FromScratch, NewestCountsMost, WarmUpBackup
from tests.toy_tasks import Toy

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {match[1]: match[0] for match in re.finditer(r"(?<=```python\n)# (\w+\.py)\n.*?(?=```)", PAGE, re.DOTALL)}
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_are_short() -> None:
    assert len(FILES) == 5
    assert all(len(text.splitlines()) <= 36 for text in FILES.values())


@pytest.mark.usefixtures("page", "warm")
def test_the_commands_run_as_they_stand(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The files run in this process, in one folder, in their order; then the page's code loads the trained model."""
    assert len(COMMANDS) == 6
    for command in COMMANDS:
        assert main(shlex.split(command)[1:]) == 0, f"{command}: {capsys.readouterr().err}"
    assert read_header(Path("warm"))["policy"] == {
        "name": "warm-up-backup",
        "quorum": 6,
        "warm_up": 20,
        "late": "cancel",
        "source": "my_policy.py:WarmUpBackup",
        "source_file": str(Path("my_policy.py").absolute()),
    }
    capsys.readouterr()
    monkeypatch.syspath_prepend(".")
    runpy.run_path("load_parameters.py")
    sys.modules.pop("plane_task")
    measured = eval(capsys.readouterr().out)
    recorded = json.loads(Path("plane/summary.json").read_text())["evaluation"]
    assert measured == pytest.approx(recorded)


@pytest.mark.parametrize("name", ["my_latency.py", "my_recorder.py"])
def test_the_scripts_run_as_they_stand(page: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(page / name), run_name="__main__")
    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(r"\d\.\d\d virtual seconds|\[\(3, 47\)\]", printed)


# ------------------------------------------------------------ a run and its reports


@pytest.mark.parametrize("policy", [WarmUpBackup(2, 5), NewestCountsMost(), FromScratch()], ids=repr)
def test_report_watch_and_plan_read_the_trace_alone(
    policy: quorate.Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    quorate.train(Toy(), policy, quorate.Simulated(3, "shifted-exp:1,1"), epochs=20, out=out)
    monkeypatch.setattr("quorate.user_code.code_to_run", None)  # a call would fail
    assert main(["report", str(out), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["policy"]["name"] == policy.name
    live = LiveMetrics()
    feed(read_trace(out), live)
    assert live.share() == 1.0
    assert main(["plan", str(out), "--json"]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("warm")
def test_a_run_is_killed_and_resumed_and_replayed(tmp_path: Path) -> None:
    """On real processes; state in plain attributes, one of them a set, goes through the checkpoint."""
    out = tmp_path / "run"
    quorate.train(Toy(), FromScratch(), 2, updates=10, out=out)
    result = quorate.resume(out, Toy(), updates=25)
    assert result.metrics.updates == 25
    assert quorate.replay(out, Toy()).result.digest == result.digest


@pytest.mark.usefixtures("warm")
def test_the_command_goes_on_with_it(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--policy", "my_policy.py:WarmUpBackup"]
    start = ["train", "--task", "plane_task.py:Plane", *own, "--policy-option", "warm_up=2", "--workers", "1+1"]
    assert main([*start, "--updates", "4", "--out", "run", "-q"]) == 0
    again = ["train", "--resume", "run", "--updates", "8", "-q"]
    assert main([*again, *own, "--policy-option", "warm_up=3"]) == 2
    assert "was made with --warm-up 2" in capsys.readouterr().err
    assert main(again) == 0, capsys.readouterr().err
    (page / "my_policy.py").rename(page / "moved.py")
    assert main(["replay", "run"]) == 2
    assert "--policy FILE.py:WarmUpBackup" in capsys.readouterr().err
    assert main(["replay", "run", "--policy", "moved.py:WarmUpBackup"]) == 0
    assert main([*again[:3], "--updates", "9", "-q", "--policy", "moved.py:WarmUpBackup"]) == 0
    assert main(["replay", "run", "--policy", "plane_task.py:Plane"]) == 2
    assert "subclass of quorate.Policy" in capsys.readouterr().err


def test_a_policy_file_elsewhere_is_not_run_unasked(
    page: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    quorate.train(
        "digits", policy_class("my_policy.py:WarmUpBackup")(quorum=2), quorate.Simulated(2), updates=2, out="run"
    )
    with (page / "my_policy.py").open("a", encoding="utf-8") as file:
        file.write("\nopen(__file__ + '.ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(quorate.BadInput, match=r"outside the current folder.*--policy .*my_policy.py:WarmUpBackup"):
        quorate.replay(page / "run", gradients=False)
    assert not (page / "my_policy.py.ran").exists()
    given = quorate.replay(page / "run", policy=f"{page / 'my_policy.py'}:WarmUpBackup", gradients=False)
    assert given.lines > 2 and (page / "my_policy.py.ran").exists()
    assert quorate.replay(page / "run", policy=policy_class(f"{page}/my_policy.py:WarmUpBackup")(quorum=1)).gradients


def test_a_script_replays_its_own_policy_without_running_twice(page: Path) -> None:
    (page / "script.py").write_text(
        FILES["my_policy.py"]
        + "\nprint('hello')\nquorate.train(None, WarmUpBackup(2, 1), quorate.Simulated(3), updates=4, out='run')\n"
        "print(quorate.replay('run').lines)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[0] == "hello" and len(done.stdout.splitlines()) == 2
    with pytest.raises(quorate.BadInput, match=r"--policy SCRIPT.py:WarmUpBackup"):
        quorate.replay("run")
    replayed = quorate.replay("run", policy="my_policy.py:WarmUpBackup")
    assert str(replayed.lines) == done.stdout.splitlines()[1]


# ------------------------------------------------------------ names and arguments


def test_names_are_taken_where_they_are_natural(page: Path) -> None:
    engine = quorate.Simulated(3)
    for name in ("full-sync", "async", "bounded", "delayed", "deadline", "adaptive"):
        assert quorate.train(None, name, engine, updates=2).metrics.header["policy"]["name"] == name
    assert quorate.train(None, quorate.FullSync, engine, updates=2).metrics.updates == 2  # type: ignore[arg-type]
    for name, words in [
        ("backup", r"policy 'backup' needs quorum; write BackupSync\(quorum=…"),
        ("k-batch", r"write KBatchSync\(quorum=…\)"),
        ("my_policy.py:WarmUpBackup", r"write WarmUpBackup\(quorum=…\)"),
        ("bakcup", r"did you mean backup\?"),
        (6, "policy is 6, a int; give a policy such as"),
        (quorate.Policy, "lacks arrived, .*docs/extending.md"),
    ]:
        with pytest.raises(quorate.BadInput, match=words):
            quorate.train(None, name, engine, updates=2)  # type: ignore[arg-type]


class Unrecorded(WarmUpBackup):
    def __init__(self, share: float) -> None:
        super().__init__(2)
        self._share = share


class Function(WarmUpBackup):
    def __init__(self, choose: Any = max) -> None:
        super().__init__(2)
        self.choose = choose


class Named(WarmUpBackup):
    name = "backup"


class Clash(WarmUpBackup):
    def __init__(self, workers: int = 3) -> None:
        super().__init__(2)
        self.workers = workers


class KeepsFile(WarmUpBackup):
    def reset(self, workers: int) -> None:
        super().reset(workers)
        self.log = Path


class Sourced(WarmUpBackup):
    def __init__(self, source: int = 1) -> None:
        super().__init__(2)
        self.source = source  # type: ignore[assignment, misc]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Unrecorded(0.5), "has no attribute 'share'; write self.share = "),
        (Function(), "cannot be recorded.*numbers, texts, lists or dicts"),
        (type("Odd", (WarmUpBackup,), {"name": "../odd"})(2), r"has the name '\.\./odd'"),
        (Named(2), "Named has the name of another policy, 'backup'"),
        (Clash(5), r"reset\(\) changes 'workers', an argument of __init__"),
        (KeepsFile(2), "keeps 'log', which no checkpoint can hold"),
        (Sourced(), "has an argument 'source'.*rename it"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_run(policy: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(quorate.BadInput, match=words):
        quorate.train(Toy(), policy, 3, updates=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_init_made_is_not_shared_between_runs() -> None:
    class Counting(FromScratch):
        def __init__(self) -> None:
            self.counts: list[int] = []

        def arrived(self, time: float, ticket: Ticket) -> Iterable[Action]:
            self.counts.append(ticket.id)
            return super().arrived(time, ticket)

    policy = Counting()
    quorate.train(None, policy, quorate.Simulated(2), updates=5)
    assert policy.counts == []


def test_a_policy_that_forgets_its_base_class_has_the_usual_settings() -> None:
    class Forgetful(quorate.RoundPolicy):
        per_update = 2

        def __init__(self) -> None:
            pass

    assert quorate.train(None, Forgetful(), quorate.Simulated(3, "shifted-exp:1,1"), updates=4).metrics.updates == 4


@pytest.mark.parametrize("engine", ["local", 2.5, quorate.Local])
def test_an_engine_that_is_none_is_answered_with_what_to_write(engine: Any) -> None:
    with pytest.raises(quorate.BadInput, match=r"or quorate.Local\(8\), Ray\(8\), Simulated\(8\)"):
        quorate.train("digits", "full-sync", engine, updates=1)


# ------------------------------------------------------------ bugs in a policy


def faulty(**hooks: Any) -> quorate.Policy:
    return type("Faulty", (FromScratch,), hooks)()


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ({"joined": lambda self, time, worker: []}, "stands still"),
        ({"joined": lambda self, time, worker: [Start(worker, 0, None)] * 2}, "starts worker 0, which is at work"),
        ({"joined": lambda self, time, worker: [Start(worker + 9, 0, None)]}, "starts worker 9, which is not there"),
        ({"joined": lambda self, time, worker: [Start(worker, 1, None)]}, "on version 1; its history is 0"),
        (
            {"arrived": lambda self, time, ticket: [Apply((ticket, ticket), None, "")]},
            "applies ticket 0, which does not",
        ),
        ({"arrived": lambda self, time, ticket: [Apply((), None, "")]}, "makes an update of no gradient"),
        ({"arrived": lambda self, time, ticket: [Apply((ticket,), (2.0,), "")]}, "weights without weighs = True"),
        ({"arrived": lambda self, time, ticket: [Drop(ticket, "")] * 2}, "drops ticket 0"),
        ({"arrived": lambda self, time, ticket: [Cancel(ticket.worker, "")]}, "cancels the work of worker 0"),
        ({"arrived": lambda self, time, ticket: ["go on"]}, "gives 'go on', which is no action"),
    ],
)
def test_a_bug_in_a_policy_is_told_in_a_sentence(hooks: dict[str, Any], words: str) -> None:
    with pytest.raises(quorate.PolicyFailed, match=words):
        quorate.train(None, faulty(**hooks), quorate.Simulated(2), updates=5)
