"""A trace names code. What it names runs unasked only from the current folder, and only if it is the user's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import quorate

from .conftest import TASKS, Quorate

#: Leaves a file behind, so that a test can tell whether it was run.
TELLTALE = TASKS + "\n\nimport pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of code outside the current folder."""
    file = tmp_path_factory.mktemp("elsewhere") / "planted.py"
    file.write_text(TELLTALE, encoding="utf-8")
    return file


def rename_task(run: Path, **header: Any) -> None:
    """Change what the trace says of its task, as somebody could who sends it."""
    trace = run / "trace.jsonl"
    first, _, rest = trace.read_text(encoding="utf-8").partition("\n")
    trace.write_text(json.dumps({**json.loads(first), **header}) + "\n" + rest, encoding="utf-8")


@pytest.fixture
def simulated(quorate_command: Quorate, here: Path) -> Path:
    assert quorate_command("simulate", "--task", "tasks.py:Line", "--updates", 3, "--out", "run").status == 0
    return here / "run"


PLANTED = {
    "by its name": lambda file: {"task": f"{file}:Line", "task_file": None},
    "by its file": lambda file: {"task": "tasks.py:Line", "task_file": str(file)},
    "by a detour": lambda file: {"task": f"run/../../{file.parent.name}/planted.py:Line", "task_file": None},
}


@pytest.mark.parametrize("how", PLANTED)
def test_replay_asks_before_it_runs_a_file_elsewhere(
    quorate_command: Quorate, simulated: Path, elsewhere: Path, how: str
) -> None:
    (simulated.parent.parent / elsewhere.parent.name).mkdir(exist_ok=True)
    planted = simulated.parent.parent / elsewhere.parent.name / "planted.py"
    planted.write_text(TELLTALE, encoding="utf-8")
    rename_task(simulated, **PLANTED[how](planted))
    ran = quorate_command("replay", "run")
    assert ran.status == 2
    assert "lies outside the current folder" in ran.err and "--task" in ran.err and "planted.py:Line" in ran.err
    assert not planted.with_suffix(".ran").exists()
    assert quorate_command("replay", "run", "--no-gradients").status == 0, "decisions need no code"
    assert not planted.with_suffix(".ran").exists()
    with pytest.raises(quorate.BadInput, match="outside the current folder"):
        quorate.replay("run")
    assert quorate_command("replay", "run", "--task", f"{planted}:Line").status == 0
    assert planted.with_suffix(".ran").exists()


@pytest.mark.parametrize("how", ["as its name", "as its source"])
def test_a_policy_is_code_too(quorate_command: Quorate, simulated: Path, elsewhere: Path, how: str) -> None:
    place = {"name": f"{elsewhere}:Own"} if how == "as its name" else {"name": "own", "source": f"{elsewhere}:Own"}
    rename_task(simulated, policy={**place, "source_file": None})
    for options in ((), ("--no-gradients",)):
        ran = quorate_command("replay", "run", *options)
        assert ran.status == 2
        assert "lies outside the current folder" in ran.err and "--policy" in ran.err
    for command in ("plan", "report"):
        quorate_command(command, "run")
    assert not elsewhere.with_suffix(".ran").exists()


def test_a_link_in_the_current_folder_is_not_taken_for_the_file(
    quorate_command: Quorate, simulated: Path, elsewhere: Path
) -> None:
    (simulated.parent / "link.py").symlink_to(elsewhere)
    rename_task(simulated, task="link.py:Line", task_file=None)
    assert "lies outside the current folder" in quorate_command("replay", "run").err
    assert not elsewhere.with_suffix(".ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_asked_for(quorate_command: Quorate, simulated: Path, here: Path) -> None:
    os.chown(here / "tasks.py", 65534, -1)
    ran = quorate_command("replay", "run")
    assert ran.status == 2
    assert "belongs to another user" in ran.err
    assert quorate_command("replay", "run", "--task", "tasks.py:Line").status == 0


def test_a_module_is_not_imported_to_see_where_it_is(
    quorate_command: Quorate, simulated: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = elsewhere.parent / "quorate_planted"
    package.mkdir()
    (package / "__init__.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()\n")
    elsewhere.rename(package / "inner.py")
    monkeypatch.syspath_prepend(str(elsewhere.parent))
    rename_task(simulated, task="quorate_planted.inner:Line", task_file=None)
    assert "lies outside the current folder" in quorate_command("replay", "run").err
    assert not list(package.glob("*.ran"))
    rename_task(simulated, task="antigravity:Line", task_file=None)
    assert "lies outside the current folder" in quorate_command("replay", "run").err


def test_a_script_of_its_own_is_asked_for(quorate_command: Quorate, simulated: Path) -> None:
    rename_task(simulated, task="__main__:Net", task_file=None)
    ran = quorate_command("replay", "run")
    assert (ran.status, ran.out) == (2, "")
    assert "--task SCRIPT.py:Net" in ran.err


@pytest.mark.usefixtures("warm")
def test_resume_asks_as_replay_does(quorate_command: Quorate, here: Path, elsewhere: Path) -> None:
    first = ("train", "--task", "tasks.py:Line", "--workers", "2", "--updates", 2, "--out", "run", "--quiet")
    assert quorate_command(*first).status == 0
    rename_task(here / "run", task_file=str(elsewhere))
    size = (here / "run" / "trace.jsonl").stat().st_size
    checkpoint = max((here / "run" / "checkpoints").iterdir())
    ran = quorate_command("train", "--resume", "run", "--updates", 4, "--quiet")
    assert ran.status == 2
    assert "lies outside the current folder" in ran.err
    with pytest.raises(quorate.BadInput, match="outside the current folder"):
        quorate.resume("run", updates=4)
    assert not elsewhere.with_suffix(".ran").exists()
    assert (here / "run" / "trace.jsonl").stat().st_size == size and checkpoint.is_dir(), "nothing was touched"


@pytest.mark.usefixtures("warm")
def test_a_run_goes_on_from_another_folder(quorate_command: Quorate, here: Path, monkeypatch: Any) -> None:
    """From above, where the task's file is below; from elsewhere, where the task is named."""
    project = here / "project"
    project.mkdir()
    (here / "tasks.py").rename(project / "tasks.py")
    monkeypatch.chdir(project)
    first = ("train", "--task", "tasks.py:Line", "--workers", "2", "--updates", 2, "--out", "run", "--quiet")
    assert quorate_command(*first).status == 0
    monkeypatch.chdir(here)
    ran = quorate_command("train", "--resume", "project/run", "--updates", 4, "--quiet", "--json")
    assert ran.json()["updates"] == 4
    assert quorate_command("replay", "project/run").status == 0
    other = here / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    refused = quorate_command("replay", "../project/run")
    named = f"--task {project / 'tasks.py'}:Line"
    assert refused.status == 2 and refused.err.rstrip().endswith(named), refused.err
    assert quorate_command("replay", "../project/run", *named.split()).status == 0
    ran = quorate_command("train", "--resume", "../project/run", "--updates", 6, "--quiet", "--json", *named.split())
    assert ran.json()["updates"] == 6


def test_a_project_that_was_moved_finds_its_task(quorate_command: Quorate, here: Path, monkeypatch: Any) -> None:
    project = here / "project"
    project.mkdir()
    (here / "tasks.py").rename(project / "tasks.py")
    monkeypatch.chdir(project)
    assert quorate_command("simulate", "--task", "tasks.py:Line", "--updates", 3, "--out", "run").status == 0
    monkeypatch.chdir(here)
    project.rename(here / "moved")
    monkeypatch.chdir(here / "moved")
    assert quorate_command("replay", "run").status == 0
    (here / "moved" / "tasks.py").rename(here / "moved" / "renamed.py")
    ran = quorate_command("replay", "run")
    assert ran.status == 2
    assert "'tasks.py' cannot be found here; give the task: --task FILE.py:Line" in ran.err


def test_a_module_that_is_not_found_is_named_with_the_remedy(quorate_command: Quorate, here: Path) -> None:
    """A script's own module is on the script's path, and not on that of the command."""
    assert quorate_command("simulate", "--task", "tasks.py:Line", "--updates", 3, "--out", "run").status == 0
    trace = here / "run" / "trace.jsonl"
    trace.write_text(trace.read_text().replace('"tasks.py:Line"', '"scripts_own:Line"', 1))
    ran = quorate_command("replay", "run")
    assert ran.status == 2
    assert "'scripts_own' cannot be found here; give the task: --task FILE.py:Line" in ran.err
