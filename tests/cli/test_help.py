"""What `--help` shows, what a mistyped name is answered with, and what stands under a result."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import quorate
from quorate.cli.app import EXAMPLES, app, tidy
from quorate.cli.options import READY_TASKS
from quorate.policies import POLICIES
from quorate.task import READY_TASKS as KNOWN

from .conftest import Quorate

COMMAND = tidy(typer.main.get_command(app))
COMMANDS = sorted(COMMAND.commands)


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_and_shows_no_types_of_python(
    name: str, columns: str, quorate_command: Quorate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ran = quorate_command(*filter(None, [name]), "--help")
    assert ran.status == 0
    assert not re.findall(r"<\w[^>]*>|list\[|\(\(|\bNone\b", ran.out)
    assert all(len(line) <= int(columns) for line in ran.out.splitlines())
    assert name == "" or "Examples" in ran.out
    if "--task" in ran.out and name != "replay":
        assert all(task in ran.out for task in KNOWN)


def test_the_ready_tasks_named_in_help_are_those_there_are() -> None:
    assert READY_TASKS.split(", ") == list(KNOWN)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_are_commands(line: str) -> None:
    """Read as they would be, but not run."""
    _, name, *arguments = shlex.split(line)
    assert COMMAND.commands[name].make_context(name, arguments).params
    assert EXAMPLES.keys() == COMMAND.commands.keys()


def test_an_option_is_written_the_same_way_everywhere() -> None:
    """Defaults differ only where a recorded run gives them, or where the command would make no sense with another."""
    metavars: dict[str, set[str]] = {}
    defaults: dict[str, set[str]] = {}
    for name, command in COMMAND.commands.items():
        options = [option for option in command.params if option.param_type_name == "option" and option.name != "help"]
        assert all(option.rich_help_panel for option in options), f"every option of {name} is in a panel"
        assert "json" in {option.name for option in options}
        for option in options:
            # A page; a launcher knows no quorum; a switch of watch.
            is_other = (name, option.name) in (("report", "out"), ("launch", "workers")) or option.name == "wait"
            if not is_other:
                metavars.setdefault(option.name, set()).add(option.metavar)
            found = re.search(r"default: (.*?)]", option.help or "")
            if name not in ("plan", "replay", "report", "watch", "demo"):
                defaults.setdefault(option.name, set()).add(found[1] if found else "")
    assert {option: ways for option, ways in metavars.items() if len(ways) > 1} == {}
    assert {option for option, ways in defaults.items() if len(ways) > 1} == {"workers", "latency", "out"}


def test_every_argument_of_a_policy_is_an_option() -> None:
    """But those that `--workers N+b` gives."""
    options = {option.name for option in COMMAND.commands["train"].params}
    for kind in POLICIES.values():
        assert set(kind.parameters()) - {"backups"} <= options


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["train", "--policy", "bakcup"], "backup"),
        (["compare", "--policies", "full-synk,backup"], "full-sync"),
        (["train", "--task", "digts"], "digits"),
        (["train", "--task", "tasks.py:Lyne"], "Line"),
        (["train", "--polcy", "backup"], "--policy"),
        (["simulate", "--latency", "shifted-xp:1,1"], "shifted-exp"),
        (["simulate", "--latency", "constant:1*slowx:3=4"], "slow"),
        (["train", "--engine", "lcoal"], "local"),
        (["simulate", "--task", "tasks.py:Line", "-q", "--until", "distanse<=0.1"], "distance"),
        (["trian"], "train"),
    ],
)
def test_a_mistyped_name_gets_a_guess(typed: list[str], meant: str, quorate_command: Quorate) -> None:
    ran = quorate_command(*typed)
    assert (ran.status, ran.out) == (2, "")
    assert f"did you mean {meant}?" in ran.err and ran.err.count("\n") == 1


def test_a_number_that_is_none_is_answered_in_words(quorate_command: Quorate) -> None:
    ran = quorate_command("train", "--updates", "ten")
    assert ran.status == 2 and "unable to parse" not in ran.err and "--updates" in ran.err


def test_a_file_without_a_class_is_answered_with_its_classes(quorate_command: Quorate, here: Path) -> None:
    (here / "one.py").write_text("raise SystemError\nclass Mine: ...\n")
    ran = quorate_command("train", "--task", "one.py")
    assert ran.err == "error: task 'one.py' does not say which class; write one.py:Mine\n"
    assert "tasks.py:Lacking or tasks.py:Line or" in quorate_command("simulate", "--task", "tasks.py").err
    assert "does not exist" in quorate_command("train", "--task", "nowhere.py").err
    (here / "one.py").write_text("x = 1\n")
    assert "has no class" in quorate_command("train", "--policy", "one.py").err


# ------------------------------------------------------------ what stands under a result


def test_a_result_says_where_it_is_or_that_it_is_nowhere(quorate_command: Quorate) -> None:
    line = ("--task", "tasks.py:Line", "--workers", "2+1", "--epochs", 1, "-q")
    nowhere = "nothing was saved; --out FOLDER keeps the "
    assert nowhere in quorate_command("simulate", *line).out.splitlines()[-1]
    assert quorate_command("simulate", *line, "--out", "my run").out.endswith("\nnext: quorate report 'my run'\n")
    several = ("compare", "--engine", "simulated", *line)
    assert nowhere in quorate_command(*several).out.splitlines()[-1]
    assert quorate_command(*several, "--out", "all").out.endswith("\nnext: quorate report all\n")
    assert quorate_command(*several, "--json").json()["out"] is None
    assert quorate_command("report", "all", "--out", "page.html").status == 0


@pytest.mark.usefixtures("warm")
def test_train_ends_with_what_to_do_next(quorate_command: Quorate) -> None:
    ran = quorate_command("train", "--task", "tasks.py:Line", "--workers", 2, "--epochs", 1, "-q")
    assert ran.out.endswith("\nnext: quorate report runs/001\n")


def test_json_is_one_object_whatever_files_print(quorate_command: Quorate, here: Path) -> None:
    chatty = "print('loaded')\n"
    (here / "tasks.py").write_text(chatty + (here / "tasks.py").read_text())
    (here / "own.py").write_text(chatty + "import quorate\nclass Own(quorate.RoundPolicy):\n    per_update = 1\n")
    line = ("--task", "tasks.py:Stream", "--workers", 2, "--json", "-q", "--policy", "own.py:Own")
    ran = quorate_command("simulate", *line, "--out", "run")
    assert ran.json()["updates"] == 1000 and "loaded" in ran.err
    for arguments in (["replay", "run"], ["report", "run"], ["watch", "run"], ["plan", "run"]):
        assert isinstance(quorate_command(*arguments, "--json").json(), dict)
    assert quorate_command("watch", "run", "--json").json()["status"] == "ended"


@pytest.mark.usefixtures("warm")
def test_the_demo_prints_json_and_leaves_a_full_folder_alone(
    quorate_command: Quorate, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorate.cli.demo.EPOCHS", 1)
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("years of work")
    ran = quorate_command("demo", "--out", "mine")
    assert ran.status == 2 and "is not empty (thesis.tex)" in ran.err and "--overwrite" in ran.err
    assert [file.name for file in (here / "mine").iterdir()] == ["thesis.tex"]
    said = quorate_command("demo", "--out", "mine", "--overwrite", "--json").json()
    assert list(said["runs"]) == ["full-sync", "backup", "async", "softsync"] and len(said["findings"]) == 3
    assert (here / "mine" / "thesis.tex").read_text() == "years of work"
    ran = quorate_command("compare", "--engine", "simulated", "--epochs", 1, "--out", "mine")
    assert ran.status == 2


# ------------------------------------------------------------ a fair comparison


@pytest.mark.usefixtures("warm")
def test_compare_never_slows_a_task_of_the_users_down(quorate_command: Quorate) -> None:
    line = ("compare", "--workers", "1+1", "--epochs", 1, "-q", "--policies")
    own = quorate_command(*line, "backup,async", "--task", "tasks.py:Line")
    assert own.out.startswith("2 worker processes, real seconds, seed 0\n")
    said = " ".join(own.out.split())
    assert (
        "Learning rate: that of tasks.py:Line, for every policy. Stale gradients usually need a lower one: async"
        in said
    )
    assert "held back" not in said
    assert "Stale" not in quorate_command(*line, "backup", "--task", "tasks.py:Line").out
    asked = quorate_command(*line, "backup", "--task", "tasks.py:Line", "--latency", "constant:0.001")
    assert "Workers were held back on purpose (constant:0.001)" in " ".join(asked.out.split())
    ready = " ".join(quorate_command(*line, "full-sync,async").out.split())
    assert "artificial delays pause:0.005,0.05,10" in ready and "--latency none runs without" in ready
    assert "those that suit the digits best: async 0.005" in ready
    none = quorate_command(*line, "full-sync", "--latency", "none")
    assert "delays" not in none.out and "held back" not in none.out


# ------------------------------------------------------------ Python as people use it


def test_names_can_be_found_by_tab_and_help() -> None:
    script = (
        "import quorate, json, sys\nassert 'torch' not in sys.modules\nnames = dir(quorate)\n"
        "import pydoc\nprint(json.dumps([names, pydoc.plain(pydoc.render_doc(quorate))]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    names, page = json.loads(done.stdout)
    assert set(quorate.__all__) <= set(names)
    listed = re.findall(r"^ {4,8}(\w+)(?:, (\w+))?  +\S.*$", page.partition("PACKAGE CONTENTS")[0], re.MULTILINE)
    assert sorted(name for names in listed for name in names if name) == sorted(set(quorate.__all__) - {"__version__"})


def test_parameters_have_the_mode_of_their_neighbours(quorate_command: Quorate, here: Path) -> None:
    quorate_command("simulate", "--task", "tasks.py:Line", "--updates", 2, "--out", "run", "-q")
    assert len({file.stat().st_mode for file in (here / "run").iterdir()}) == 1
    assert (here / "run" / "parameters.safetensors").exists()
