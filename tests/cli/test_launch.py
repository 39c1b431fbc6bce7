"""`quorate launch`: its processes, their output, failures, restarts and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

LAUNCH = [sys.executable, "-m", "quorate", "launch"]

#: Prints what it was given; ends as its arguments say. It imports no torch, so it starts at once.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"pid-{rank}").write_text(str(os.getpid()))
print(f"{rank} of {os.environ['WORLD_SIZE']}, attempt {attempt}, {sys.argv[1:]}")
for argument in sys.argv[1:]:
    what, _, who = argument.partition("@")
    if who not in ("", rank):
        continue
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "once" and attempt == "0":
        sys.exit(5)
    elif what == "exit":
        sys.exit(3)
    elif what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    elif what == "wait":
        Path(f"waits-{rank}").touch()
        time.sleep(600)
    elif what == "bar":
        sys.stderr.write("10 %\\r20 %\\rdone\\nno end of line")
"""

TRAINS = """
import sys
import torch
import torch.distributed as dist
import quorate

dist.init_process_group("gloo")
net = torch.nn.Linear(2, 1)
model = quorate.DataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1), checkpoint="checkpoints")
resumed = model.version
while model.version < 6:
    if resumed == 0 and model.version == 3 and model.worker == 1:
        sys.exit(4)
    model(torch.ones(3, 2)).mean().backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
model.finish()
print("from", resumed, "to", model.version)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def launch(here: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, *map(str, arguments)]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100, check=False)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it never came to that")


def are_gone(here: Path) -> bool:
    return not any(Path(f"/proc/{file.read_text()}/cmdline").exists() for file in here.glob("pid-*"))


def test_every_process_gets_its_rank_and_the_scripts_own_arguments(here: Path) -> None:
    ran = launch(here, "--workers", 3, "script.py", "--restarts", "7")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = [f"[{rank}] {rank} of 3, attempt 0, ['--restarts', '7']" for rank in range(3)]
    assert sorted(ran.stdout.splitlines()) == lines


def test_a_module_is_started_by_its_name(here: Path) -> None:
    ran = launch(here, "-w", 1, "--module", "script", "a")
    assert ran.stdout == "[0] 0 of 1, attempt 0, ['a']\n"


def test_lines_stay_whole_and_a_progress_bar_one_line(here: Path) -> None:
    ran = launch(here, "-w", 1, "script.py", "bar")
    assert ran.stderr.encode() == b"[0] 10 %\n[0] 20 %\n[0] done\n[0] no end of line\n"  # text mode reads \r as \n


@pytest.mark.parametrize(
    ("how", "status", "sentence"),
    [
        ("exit@1", 3, "process 1 ended with status 3"),
        ("kill@0", 137, "process 0 was ended by SIGKILL"),
    ],
)
def test_the_first_failure_is_named_and_is_the_exit_status(here: Path, how: str, status: int, sentence: str) -> None:
    ran = launch(here, "-w", 2, "script.py", how)
    assert ran.returncode == status
    assert ran.stderr == f"quorate launch: {sentence}\n"


def test_the_others_are_ended_when_they_do_not_end_themselves(here: Path) -> None:
    hurried = (
        "import quorate.cli.launch as l, quorate.cli, sys; l.GRACE_S = l.TERM_S = 0.5; sys.exit(quorate.cli.main())"
    )
    command = [sys.executable, "-c", hurried, "launch", "-w", "3", "script.py", "stubborn@2", "exit@0", "wait"]
    ran = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 3
    assert ran.stderr == "quorate launch: process 0 ended with status 3\n"
    assert are_gone(here)


def test_all_start_again_while_restarts_are_left(here: Path) -> None:
    ran = launch(here, "-w", 2, "--restarts", 2, "--json", "script.py", "once@1")
    assert ran.returncode == 0
    found = json.loads(ran.stdout)
    assert (found["statuses"], found["restarts"]) == ([0, 0], 1)
    assert "quorate launch: process 1 ended with status 5; restart 1 of 2 in 0.5 s\n" in ran.stderr
    assert "[1] 1 of 2, attempt 1, ['once@1']" in ran.stderr


def test_a_failure_beyond_the_restarts_is_the_end(here: Path) -> None:
    ran = launch(here, "-w", 1, "--restarts", 1, "script.py", "exit")
    assert ran.returncode == 3
    assert ran.stderr.splitlines()[-1] == "quorate launch: process 0 ended with status 3, after 1 restart"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all(here: Path, number: signal.Signals, status: int) -> None:
    command = [*LAUNCH, "-w", "2", "script.py", "wait"]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: all((here / f"waits-{rank}").exists() for rank in range(2)))
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err.splitlines()[-1] == "stopped"
    assert are_gone(here)


def test_a_second_signal_kills_what_does_not_hear_the_first(here: Path) -> None:
    command = [*LAUNCH, "-w", "2", "script.py", "stubborn", "wait"]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: all((here / f"waits-{rank}").exists() for rank in range(2)))
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)  # less than the time that one signal leaves them
    assert process.returncode == 130
    assert are_gone(here)


def test_no_process_outlives_a_killed_launcher(here: Path) -> None:
    with subprocess.Popen([*LAUNCH, "-w", "2", "script.py", "stubborn", "wait"], cwd=here) as process:
        wait_until(lambda: all((here / f"waits-{rank}").exists() for rank in range(2)))
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: are_gone(here))


def test_bad_input_is_one_sentence(here: Path) -> None:
    ran = launch(here, "-w", 2, "script", "--epochs", 3)
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: there is no script 'script'; options of quorate stand before the script, its own after it\n"
    )
    assert launch(here, "script.py").stderr == "error: Missing option '--workers' / '-w'; see 'quorate launch --help'\n"


def test_a_restarted_script_goes_on_from_its_checkpoint(here: Path) -> None:
    """Without the variable that torchrun needs for this: each restart has a new store."""
    (here / "trains.py").write_text(TRAINS)
    ran = launch(here, "-w", 2, "--restarts", 1, "trains.py")
    assert ran.returncode == 0, ran.stderr
    assert "process 1 ended with status 4" in ran.stderr
    assert "; restart 1 of 1 in 0.5 s" in ran.stderr
    assert sorted(ran.stdout.splitlines()) in (
        ["[0] from 2 to 6", "[1] from 2 to 6"],
        ["[0] from 3 to 6", "[1] from 3 to 6"],
    )
