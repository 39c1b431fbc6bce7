"""A run of its own, as a user starts it, and a signal from outside: what becomes of it and of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quorate
from quorate.engines.local.fork_server import process_state
from tests.conftest import REPOSITORY
from tests.engines.local.checking import versions_saved
from tests.engines.local.scripts import ENDLESS
from tests.engines.local.tasks import Disturbed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


class Run:
    """A run in another process, and the processes that it has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "endless.py").write_text(ENDLESS)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "endless.py", str(folder / "run")],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def all_processes(self) -> list[int]:
        """Workers and template, once it has got going."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        workers: list[int] = json.loads(line)
        template = int(Path(f"/proc/{workers[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        assert len(workers) == 3 and template != self.process.pid
        return [*workers, template]

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Those that the selected tests want, at once, since each takes seconds to import torch."""
    folder = tmp_path_factory.mktemp("runs")
    chosen = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]
    begun = {name: Run(folder / name) for name in chosen}
    yield begun
    for run in begun.values():
        run.process.kill()
        run.process.communicate()


def alive(processes: list[int]) -> list[int]:
    return [pid for pid in processes if (state := process_state(pid)) is not None and state[0] != "Z"]


def wait_until_it_stands_still(trace: Path) -> None:
    sizes = [-1]
    while sizes[-3:] != [sizes[-1]] * 3:
        time.sleep(0.2)
        sizes.append(trace.stat().st_size)


def check_resumable(folder: Path) -> None:
    version = versions_saved(folder)[-1]
    result = quorate.resume(folder / "run", Disturbed(), updates=version + 5)
    assert result.summary["updates"] == version + 5
    assert quorate.replay(folder / "run", Disturbed()).result.digest == result.digest


@pytest.mark.parametrize("name", ["killed"])
def test_a_killed_main_process_leaves_nobody_behind(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    processes = run.all_processes()
    shared = {entry.name for entry in Path("/dev/shm").iterdir()}
    assert alive(processes) == processes
    run.process.kill()
    status, _ = run.end()
    assert status == -signal.SIGKILL
    until = time.monotonic() + 20
    while alive(processes) and time.monotonic() < until:
        time.sleep(0.005)
    assert alive(processes) == []
    assert {entry.name for entry in Path("/dev/shm").iterdir()} <= shared
    check_resumable(run.folder)


@pytest.mark.long  # test_signals has them without a process each
@pytest.mark.parametrize("name", ["asked"])
def test_asked_to_end_it_ends_well(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    processes = run.all_processes()
    run.process.send_signal(signal.SIGTERM)
    _, errors = run.end()
    assert "Interrupted: SIGTERM ended the run after update" in errors
    assert alive(processes) == []
    end = list(quorate.read_trace(run.folder / "run"))[-1]
    assert end["event"] == "end" and versions_saved(run.folder)[-1] == end["version"]
    assert json.loads((run.folder / "run" / "summary.json").read_text())["updates"] == end["version"]
    check_resumable(run.folder)


@pytest.mark.parametrize("name", ["urged"])
def test_urged_to_end_it_ends_at_once(runs: dict[str, Run], name: str) -> None:
    """Workers that hang keep it from finishing its update; a second Ctrl-C is enough."""
    run = runs[name]
    processes = run.all_processes()
    (run.folder / "run" / "hang").touch()
    wait_until_it_stands_still(run.folder / "run" / "trace.jsonl")
    run.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.5)
    run.process.send_signal(signal.SIGINT)
    status, errors = run.end()
    assert status == -signal.SIGINT and errors.rstrip().splitlines()[-1] == "KeyboardInterrupt: SIGINT"
    assert alive(processes) == []
    assert not (run.folder / "run" / "summary.json").exists()
    check_resumable(run.folder)
