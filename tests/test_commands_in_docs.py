"""Every command that README and docs show works when it is copied, or is marked as one that cannot run here.

A block of commands opens with ```sh. `<!-- not run: why -->` in the line before it keeps a block out; nothing else
does. The blocks of a page run in order, in one folder that holds what a reader has by then: a task of their own,
two runs, a comparison and the step times of a DDP script.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .test_docs import PAGES, REPOSITORY
from .test_readme import README

BLOCK = re.compile(r"(?m)^( *)(?:<!-- not run: (?P<why>[^\n]+) -->\n *)?```sh\n(?P<text>.*?)^ *```$", re.DOTALL)
NAMED_FILE = re.compile(r"```python\n(?P<text># (?P<name>\w+\.py)\n.*?)```", re.DOTALL)  # a file that a page shows
PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:sudo )?(?:quorate|torchrun|make|pip|python3?|ray|export|git|cd)"
TASK = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


class MyTask:
    batch_size = 32

    def model(self):
        return nn.Linear(4, 1)

    def train_data(self):
        inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)
"""


def blocks(page: Path) -> list[str]:
    """The commands of a page that are to run, a block each."""
    return [found["text"] for found in BLOCK.finditer(page.read_text()) if found["why"] is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who followed the README; the commands of every page write into it."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_task.py").write_text(TASK)
    run("quorate simulate --task my_task.py:MyTask --workers 6+2 --updates 200 --out runs/002", folder)
    interrupt_a_run(folder)
    run("quorate compare --engine simulated --workers 6+2 --epochs 2 --out comparison", folder)
    rows = (
        f"{step},{worker},{0.05 + 0.01 * ((step * 7 + worker * 3) % 5)}" for step in range(60) for worker in range(4)
    )
    (folder / "times.csv").write_text("\n".join(("step,worker,seconds", *rows, "")))
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def interrupt_a_run(folder: Path) -> None:
    """`runs/001`: ended by Ctrl-C, so that it can be reported, planned from, replayed and resumed."""
    command = "quorate train --task my_task.py:MyTask --workers 6+2 --epochs 120 --latency constant:0.05 --out runs/001"
    with (
        environment() as variables,
        subprocess.Popen(command.split(), cwd=folder, env=variables, stderr=subprocess.PIPE) as process,
    ):
        trace = folder / "runs/001/trace.jsonl"
        while process.poll() is None and not (trace.exists() and trace.read_text().count('"apply"') > 40):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130, said.decode()


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Our programs first, and a temporary folder for what torchrun leaves behind."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as temporary:
        yield os.environ | {"PATH": places, "OMP_NUM_THREADS": "1", "TMPDIR": temporary}


def run(commands: str, folder: Path) -> str:
    """Run commands as a reader's shell would, and end at the first that fails."""
    with environment() as variables:
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, f"{commands}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


@pytest.mark.docs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    for file in NAMED_FILE.finditer(page.read_text()):
        (folder / file["name"]).write_text(file["text"])
    for text in blocks(page):
        run(text, folder)


@pytest.mark.docs
@pytest.mark.timeout(600)
def test_the_commands_of_the_readmes_table_run(folder: Path) -> None:
    table = README.split("## What you can do with it")[1].split("\n## ")[0]
    commands = re.findall(r"`(quorate [^`]*)`", table)
    assert len(commands) >= 8
    for command in commands:
        if command.startswith("quorate watch"):
            command += " --terminal"  # without it a page is served until Ctrl-C
        if "--address" not in command:  # that one needs a cluster
            run(command, folder)


@pytest.mark.docs
@pytest.mark.timeout(300)
def test_the_readmes_first_commands_run_in_an_empty_folder(tmp_path: Path) -> None:
    first_screen = README.split("\n## ")[0]
    commands = [found["text"] for found in BLOCK.finditer(first_screen) if found["why"] is None]
    assert commands
    for text in commands:
        run(text, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "001" / "report.html").exists()
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.docs
@pytest.mark.timeout(300)
def test_the_readmes_first_example_runs_in_an_empty_folder(tmp_path: Path) -> None:
    found = re.search(r"```python\n(import quorate.*?)```", README, re.DOTALL)
    assert found is not None
    (tmp_path / "first.py").write_text(found[1])
    lines = run("python first.py", tmp_path).splitlines()
    assert [line.split("(")[0] for line in lines] == ["FullSync", "BackupSync", "KBatchSync"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["first.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_command_hides_in_a_block_that_is_not_run(page: Path) -> None:
    """Commands stand in ```sh blocks: indented ones, or those without a language, are never run."""
    text = page.read_text()
    bare = re.findall(r"(?m)^```(?:text|console|bash|shell)?\n((?:(?!```).*\n)*?)```$", text)
    lines = [line for block in bare for line in block.splitlines()]
    without_fences = re.sub(r"(?ms)^( *)```.*?^\1```$", "", text)
    lines += [line.strip() for line in without_fences.splitlines() if line.startswith("    ")]
    assert [line for line in lines if re.match(rf"{PROGRAMS} \S", line)] == []
