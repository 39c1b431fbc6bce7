"""The command lines of one experiment and of all: options, wrong ones, failures, and what a signal leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import experiments.__main__ as everything
import pytest
from experiments.common.children import Children
from experiments.common.command import Experiment, Options, main
from experiments.common.trials import TrialsFailed

from quorate.errors import BadInput

REPOSITORY = Path(__file__).parent.parent.parent


class Told(Experiment):
    """Remembers how it was called."""

    name, what, takes = "told", "Is it called as asked?", "no time"

    def __init__(self, then: Callable[[], bool] = lambda: True) -> None:
        self.ran: list[Options] = []
        self.drew: list[Path] = []
        self._then = then

    def run(self, options: Options) -> bool:
        self.ran.append(options)
        return self._then()

    def figures(self, folder: Path) -> list[Path]:
        self.drew.append(folder)
        return [folder / "a.png"]


# ---------------------------------------------------------------- one experiment


def test_a_full_run_goes_into_the_committed_results_and_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told()
    arguments = ["run", "--data", "d", "--device", "cuda", "--processes", "3", "--limit-s", "5"]
    assert main(told, arguments) == 0
    assert told.ran == [Options(REPOSITORY / "experiments/told/results", Path("d"), "cuda", 3, 5.0, False)]
    assert told.drew == [] and capsys.readouterr().out == "complete\n"


def test_a_quick_run_draws_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told()
    assert main(told, ["run", "--quick", "--out", str(tmp_path)]) == 0
    assert told.ran[0].quick and told.ran[0].out == tmp_path and told.drew == [tmp_path]
    assert capsys.readouterr().out.splitlines() == ["complete", str(tmp_path / "a.png")]


def test_a_run_that_is_not_complete_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Told(lambda: False), ["run", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "stopped at the time limit; the same command goes on\n"


def raises(error: BaseException) -> Callable[[], bool]:
    def fail() -> bool:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (BadInput("no data; put it there"), 2, "error: no data; put it there"),
        (TrialsFailed("2 trials failed"), 1, "error: 2 trials failed"),
        (KeyboardInterrupt(), 130, "stopped; what is finished is kept, and the same command goes on"),
        (KeyboardInterrupt("SIGTERM"), 143, "stopped; what is finished is kept, and the same command goes on"),
    ],
)
def test_what_ends_a_run_early_is_one_sentence_and_a_status(
    error: BaseException, status: int, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(Told(raises(error)), ["run", "--out", str(tmp_path)]) == status
    assert capsys.readouterr().err == f"{sentence}\n"


def test_sigterm_ends_a_run_as_ctrl_c_does_and_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def be_told_to_end() -> bool:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    assert main(Told(be_told_to_end), ["run", "--out", str(tmp_path)]) == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--quick"], "give a folder of its own (--out)"),
        (["run", "--processes", "0"], "processes is 0, but it must be at least 1"),
        (["run", "--limit-s", "0"], "limit-s is 0, but a time must be more than 0"),
        (["run", "--limit-s", "nan"], "limit-s is nan, but a time must be more than 0"),
    ],
)
def test_wrong_options(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told()
    assert main(told, arguments) == 2
    assert sentence in capsys.readouterr().err and told.ran == []


# ---------------------------------------------------------------- all of them


class Calls:
    """In place of processes: what they were called with, and what they say and come to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: dict[str, int] | None = None) -> None:
        self.commands: list[list[str]] = []
        self._status = status or {}
        monkeypatch.setattr(everything.Children, "run", self._run)

    def _run(self, command: list[str], hear: Callable[[str], None]) -> int:
        self.commands.append(command[2:])
        hear("complete")
        return self._status.get(command[2].split(".")[1], 0)


def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments that know their names."""

    def experiment(name: str) -> Told:
        told = Told()
        told.name = name  # type: ignore[misc]
        return told

    monkeypatch.setattr(everything, "NAMES", ("one", "other"))
    monkeypatch.setattr(everything, "experiment", experiment)


def test_every_option_reaches_every_experiment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch)
    calls = Calls(monkeypatch)
    assert everything.main(["run", "--data", "d", "--device", "cuda", "--processes", "2"]) == 0
    options = ["run", "--device", "cuda", "--processes", "2", "--data", "d"]
    assert calls.commands == [["experiments.one", *options], ["experiments.other", *options]]
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ["one: begun", "one: complete", "one: done after 0 s"]
    assert [line.split() for line in shown[-2:]] == [[name, "0", "s", "complete"] for name in ("one", "other")]


def test_quick_ones_have_folders_of_their_own_and_figures_go_where_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named(monkeypatch)
    calls = Calls(monkeypatch)
    assert everything.main(["quick", "other", "other", "--out", str(tmp_path)]) == 0
    assert calls.commands == [["experiments.other", "run", "--quick", "--out", str(tmp_path / "other")]]
    assert everything.main(["figures", "one"]) == 0
    assert calls.commands[1:] == [["experiments.one", "figures"]]


def test_one_that_fails_does_not_take_the_others_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch)
    calls = Calls(monkeypatch, {"one": 2})
    assert everything.main(["figures"]) == 1
    assert len(calls.commands) == 2
    shown = capsys.readouterr().out
    assert "one: complete" in shown and "FAILED with status 2" in shown


def test_the_time_limit_is_that_of_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    named(monkeypatch)
    calls = Calls(monkeypatch)
    clock = iter([0.0, 4.0, 4.0, 9.0, 11.0])
    monkeypatch.setattr(everything.time, "monotonic", lambda: next(clock))
    assert everything.main(["run", "--limit-s", "10"]) == 0
    assert [command[-2:] for command in calls.commands] == [["--limit-s", "6.000"]]
    assert "not begun, the time is over" in capsys.readouterr().out


def test_wrong_names_are_told_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert everything.main(["quick", "nobody"]) == 2
    said = capsys.readouterr().err
    assert "experiment 'nobody' is not known; choose one of: " in said and "delay" in said
    assert everything.main(["run", "--limit-s", "-3"]) == 2
    assert everything.main(["run", "--processes", "0"]) == 2


def test_the_list_has_every_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert everything.main(["list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(everything.NAMES)


NO_LIBRARY = """
import sys
for name in ("matplotlib", "scipy", "gymnasium", "ray", "rich", "typer", "safetensors", "starlette"):
    sys.modules[name] = None  # importing it is an error
from experiments.__main__ import NAMES, experiment
print(*[experiment(name).name for name in NAMES])
"""


@pytest.mark.experiments
def test_a_run_needs_torch_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_LIBRARY], capture_output=True, text=True, timeout=100, check=False, cwd=REPOSITORY
    )
    assert done.stdout.split() == list(everything.NAMES), done.stderr


# ---------------------------------------------------------------- processes

CHILD = "import signal, sys, time; print('ready', flush=True); time.sleep(1000)"


def test_a_child_that_is_under_way_ends_and_no_other_begins() -> None:
    children, heard, ready = Children(), [], threading.Event()
    status: list[int | None] = []

    def hear(line: str) -> None:
        heard.append(line)
        ready.set()

    thread = threading.Thread(target=lambda: status.append(children.run([sys.executable, "-c", CHILD], hear)))
    thread.start()
    assert ready.wait(60)
    children.end()
    thread.join(60)
    assert (status, heard) == ([-signal.SIGTERM], ["ready"])
    assert children.run([sys.executable, "-c", CHILD], hear) is None


ALL_OF_THEM = """
import sys
import experiments.__main__ as everything
from experiments.common.command import Experiment
class Slow(Experiment):
    name = what = takes = "slow"
    def run(self, options): ...
    def figures(self, folder): ...
everything.NAMES = ("slow",)
everything.experiment = lambda name: Slow()
everything._arguments = lambda *rest: []
real = everything.Children.run
everything.Children.run = lambda self, command, hear: real(self, [sys.executable, "-c", sys.argv[1]], hear)
sys.exit(everything.main(["run"]))
"""
SAYS_ITS_NUMBER = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


@pytest.mark.experiments
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_children_and_is_the_status(number: int, status: int) -> None:
    command = [sys.executable, "-c", ALL_OF_THEM, SAYS_ITS_NUMBER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "slow: begun\n"
        child = int(parent.stdout.readline().removeprefix("slow: "))
        parent.send_signal(number)
        _, said = parent.communicate(timeout=60)
    assert parent.returncode == status
    assert said == "stopped; what is finished is kept, and the same command goes on\n"
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
