"""A process that dies, hangs or fails ends the others in seconds, with a sentence that says who and what to do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_parallel.launching import Launch, Launcher

pytestmark = pytest.mark.data_parallel

WORKERS = 3
SECONDS_S = 40.0  # "within seconds", on a machine that may be very busy; without a word it would be half an hour


class Dying:
    """Runs scripts/dying.py, and leaves nothing behind."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self.launch: Launch | None = None

    def __call__(self, policy: str, where: str, patience_s: float = 30.0) -> Launch:
        environment = {"PATIENCE_S": str(patience_s)}
        folder = str(self._folder)
        self.launch = self._launcher.launch(
            "dying.py", WORKERS, self._folder, folder, policy, where, environment=environment
        )
        return self.launch


@pytest.fixture
def dying(launcher: Launcher, tmp_path: Path) -> Iterator[Dying]:
    made = Dying(launcher, tmp_path)
    yield made
    if made.launch is not None:
        made.launch.close()


def _check_others(launch: Launch, who: int, sentence: str, codes: list[int]) -> None:
    others = [worker for worker in range(WORKERS) if worker != who]
    assert [codes[worker] for worker in others] == [1, 1]
    for worker in others:
        last = launch.text(worker).strip().splitlines()[-1]
        assert "ProcessLost" in last and f"worker {who} (pid {launch.pids[who]}" in last and sentence in last
        assert "no further version can be made; start again" in last
        assert launch.text(worker).count("ProcessLost") == 1, "said once"


@pytest.mark.parametrize("policy", ["full", "backup"])
@pytest.mark.parametrize("who", [1, 0])
def test_a_killed_process_ends_the_others(dying: Dying, policy: str, who: int) -> None:
    """Killed in its forward, while the others have gone on to step() and wait for it, or train without it."""
    launch = dying(policy, f"forward:{who}")
    launch.wait_for_line(who, "here")
    launch.kill(who)
    codes = launch.wait(SECONDS_S)
    assert codes[who] == -signal.SIGKILL
    _check_others(launch, who, "died", codes)


@pytest.mark.parametrize(("policy", "who"), [("full", 2), ("delayed", 1), ("all", 0)])
def test_a_process_killed_with_its_gradient_on_the_way(dying: Dying, policy: str, who: int) -> None:
    launch = dying(policy, f"step:{who}")
    codes = launch.wait(SECONDS_S)
    assert codes[who] == -signal.SIGKILL
    _check_others(launch, who, "died", codes)


@pytest.mark.parametrize(("policy", "who"), [("full", 1), ("delayed", 0), ("backup", 0)])
def test_an_exception_in_one_process_ends_all(dying: Dying, policy: str, who: int) -> None:
    launch = dying(policy, f"raise:{who}")
    codes = launch.wait(SECONDS_S)
    assert codes[who] == 1
    assert launch.text(who).strip().splitlines()[-1].endswith("ValueError: a bug in the script")
    _check_others(launch, who, "died", codes)


@pytest.mark.parametrize("policy", ["full", "backup"])
def test_sys_exit_with_a_status_ends_all(dying: Dying, policy: str) -> None:
    launch = dying(policy, "exit")
    codes = launch.wait(SECONDS_S)
    assert codes[1] == 3
    _check_others(launch, 1, "died", codes)


def test_a_process_that_is_silent_for_too_long_counts_as_lost(dying: Dying) -> None:
    launch = dying("full", "forward", patience_s=3.0)
    launch.wait_for_line(1, "here")
    launch.kill(1, signal.SIGSTOP)
    launch.wait(SECONDS_S, but=(1,))
    codes = [0 if code is None else code for code in launch.codes]
    _check_others(launch, 1, "has been silent for 3 s", codes)


@pytest.mark.parametrize("policy", ["full", "backup"])
def test_ctrl_c_ends_all_as_it_ends_any_script(dying: Dying, policy: str) -> None:
    launch = dying(policy, "nowhere")
    for worker in range(WORKERS):
        launch.wait_for_line(worker, "training")
    for worker in range(WORKERS):
        launch.kill(worker, signal.SIGINT)
    codes = launch.wait(SECONDS_S)
    # Who was interrupted later may have heard of the first before.
    assert -signal.SIGINT in codes and set(codes) <= {-signal.SIGINT, 1}
    for worker in range(WORKERS):
        assert "terminate called" not in launch.text(worker)
