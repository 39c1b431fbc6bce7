"""The command as a process of its own: what only shows there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

QUORATE = [sys.executable, "-m", "quorate"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*QUORATE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)


def test_stdout_is_the_json_object_and_nothing_else(here: Path) -> None:
    ran = run("simulate", "--task", "tasks.py:Line", "--workers", "3+1", "--json", cwd=here)
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["samples"] == {"applied": 20 * 64, "distinct": 64}
    assert ran.stderr == ""


def test_statuses_and_tracebacks(here: Path) -> None:
    bad = run("simulate", "--workers", "6-2", cwd=here)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: workers is '6-2'") and "Traceback" not in bad.stderr
    theirs = run("simulate", "--task", "tasks.py:Broken", cwd=here)
    assert theirs.returncode == 1
    assert "Traceback" in theirs.stderr and "tasks.py" in theirs.stderr
    assert theirs.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_ctrl_c_ends_with_a_sentence_and_keeps_the_trace(here: Path) -> None:
    command = [*QUORATE, "simulate", "--no-gradients", "--updates", "1000000000", "--out", "run"]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        trace = here / "run" / "trace.jsonl"
        for _ in range(600):
            if trace.exists() and '"apply"' in trace.read_text():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    sentence = err.splitlines()[-1]
    assert sentence.startswith("stopped full-sync 8 at update ")
    assert sentence.endswith("; the trace so far is in 'run/trace.jsonl'")
    lines = trace.read_text().splitlines()
    assert json.loads(lines[0])["event"] == "run"
    assert json.loads(lines[-1])["event"] != "end"


def python(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=100)


#: A package `quorate` that imports nothing by itself, so that what the command line imports can be seen.
BARE = """
import importlib.util, sys, types
package = types.ModuleType("quorate")
package.__path__ = list(importlib.util.find_spec("quorate").submodule_search_locations)
sys.modules["quorate"] = package
"""


def test_help_needs_neither_torch_nor_matplotlib(here: Path) -> None:
    script = BARE + (
        "from quorate.cli import main\n"
        "commands = ('train', 'simulate', 'compare', 'demo')\n"
        "for arguments in (['--help'], ['--version'], *([command, '--help'] for command in commands)):\n"
        "    assert main(arguments) == 0\n"
        "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules), 'slow to start'\n"
    )
    ran = python(script, here)
    assert ran.returncode == 0, ran.stderr
    assert "--staleness-weights" in ran.stdout
    assert "quorate 0." in ran.stdout


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_its_libraries_the_command_line_says_what_to_type(here: Path, library: str) -> None:
    script = BARE + f"sys.modules[{library!r}] = None\nfrom quorate.cli import main\nsys.exit(main(['--help']))\n"
    ran = python(script, here)
    assert ran.returncode == 1
    assert ran.stderr.strip().endswith(f"type: pip install {library}")
    assert "Traceback" not in ran.stderr
