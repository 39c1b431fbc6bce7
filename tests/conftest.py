"""Leak police and shared settings: a test that leaves something behind fails."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# The machines are shared and noisy, so no example has a deadline; derandomised, so that CI is repeatable.
settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)  # small models gain nothing from more, and lose much when the machine is busy

REPOSITORY = Path(__file__).parent.parent
_TORCHS_OWN = ("torchinductor_", "TORCHINDUCTOR_")  # a cache folder that torch makes when it is first used
_IGNORED_HERE = {".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__", ".coverage"}
#: What these leave is removed soon: a program beside the tests that has ended, and processes of a data loader, which
#: look every five seconds whether their parent is alive.
_OTHERS_END_S = 10.0


#: By marker, how many of its tests this session leaves out.
LEFT_OUT: Counter[str] = Counter()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        LEFT_OUT.update(name for name in _markers(item.config) if item.get_closest_marker(name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What `make test` does not run, and what does."""
    if LEFT_OUT and not config.option.keyword:
        terminalreporter.section("left out, by marker")
        for name, says in _markers(config).items():
            if LEFT_OUT[name]:
                terminalreporter.line(f"{LEFT_OUT[name]:5} {name}: {says}")


def _markers(config: pytest.Config) -> dict[str, str]:
    """Our markers, with what pyproject.toml says of them: it ends with the command that runs their tests."""
    pairs = (line.partition(":") for line in config.getini("markers"))
    return {name: says.strip() for name, _, says in pairs if "make test-" in says}


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """A shell lets what it starts in the background ignore SIGINT (`nohup make test &`), and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Everything that tests put into "the" temporary folder lands in one of ours, where it can be counted."""
    folder = tmp_path_factory.mktemp("private")
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    os.environ["TMPDIR"] = str(folder)
    yield
    tempfile.tempdir = before
    os.environ.pop("TMPDIR", None)


class Belongings:
    """What this process has that a test could leave behind."""

    def __init__(self) -> None:
        self.threads = {thread.name for thread in threading.enumerate()}
        self.processes = _children()
        self.descriptors = _descriptors()
        self.shared_memory = _names(Path("/dev/shm"))
        self.files = _names(Path(tempfile.gettempdir())) | (_names(REPOSITORY) - _IGNORED_HERE)
        self.variables = dict(os.environ)

    def left_behind(self, before: Belongings) -> dict[str, object]:
        found: dict[str, object] = {
            "threads": self.threads - before.threads,
            "processes": self.processes - before.processes,
            "files or sockets": {
                number: target for number, target in self.descriptors.items() if number not in before.descriptors
            },
            "shared memory": _without_others(self.shared_memory - before.shared_memory),
            "files on disk": self.files - before.files,
            "environment": {
                key
                for key in self.variables.keys() | before.variables.keys()
                if self.variables.get(key) != before.variables.get(key)
                and not key.startswith(("PYTEST_", *_TORCHS_OWN))
            },
        }
        return {kind: left for kind, left in found.items() if left}


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def _descriptors() -> dict[int, str]:
    """Open files and sockets. Anonymous ones (epoll and the like) and devices belong to libraries."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if not target.startswith(("/dev/null", "/dev/nvidia", "anon_inode", "/dev/urandom", "/proc/")):
            found[int(entry.name)] = target
    return found


def _names(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith(_TORCHS_OWN)}


def _without_others(shared_memory: set[str]) -> set[str]:
    """What no process outside this one's family uses: /dev/shm is the whole machine's."""
    if not shared_memory:
        return set()
    parents, used = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that ended meanwhile
            pid = int(process.name)
            parents[pid] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            maps = (process / "maps").read_text()
            used[pid] = {name for name in shared_memory if f"/dev/shm/{name}\n" in maps}
    return shared_memory - set().union(*(names for pid, names in used.items() if not _is_ours(pid, parents)))


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    while pid not in (0, os.getpid()):
        pid = parents.get(pid, 0)
    return pid == os.getpid()


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest, private_temporary_folder: None) -> Iterator[None]:
    before = Belongings()
    yield
    left = Belongings().left_behind(before)
    if left:
        gc.collect()  # what only waits for the garbage collector is not left behind
        left = Belongings().left_behind(before)
    end = time.monotonic() + _OTHERS_END_S
    while set(left) <= {"shared memory", "files on disk"} and left and time.monotonic() < end:
        time.sleep(0.1)
        left = Belongings().left_behind(before)
    if left:
        pytest.fail(f"{request.node.name} left behind: {left}")


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local workers start in a fifth of a second, for tests that are not about starting."""
    from quorate.engines.local import fork_server
    from tests.engines.local.warm_fork_server import WARM

    monkeypatch.setattr(fork_server, "subprocess", WARM)


@pytest.fixture(autouse=True)
def traces_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test lets quorate write, quorate accepts when it reads it."""
    from quorate.trace import TraceWriter, read_lenient

    close = TraceWriter.close

    def close_and_read(self: TraceWriter) -> None:
        was_open = not self._file.closed
        close(self)
        if was_open and self._path.is_file():
            with self._path.open("rb") as file:
                is_whole = b'"policy"' in file.readline()  # else the test writes lines of its own
            for _ in read_lenient(self._path, lambda _: None) if is_whole else ():
                pass

    monkeypatch.setattr(TraceWriter, "close", close_and_read)
