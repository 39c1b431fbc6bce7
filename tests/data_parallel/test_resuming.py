"""A restarted script goes on from the newest checkpoint that any of its processes sees, wherever that one is.

The processes are threads here, with a group that meets at barriers; tests/data_parallel/test_elastic.py has real ones.
"""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quorate.checkpoint import CheckpointFolder, Loaded
from quorate.data_parallel import resuming
from quorate.data_parallel.resuming import Resumed, StartExchange, newest_of_all, saving_if_asked, start_saving
from quorate.errors import BadInput
from tests.checkpoint.states import same, some_state
from tests.data_parallel.test_saving import Script

pytestmark = pytest.mark.data_parallel


class Meeting:
    """The group of one of several threads: what one gives, the others get."""

    def __init__(self, worker: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.worker, self._table, self._barrier = worker, table, barrier

    def gather_bytes(self, own: bytes) -> list[bytes]:
        return list(self._met(own))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._met(tensor.clone())[source])

    def _met(self, own: Any) -> list[Any]:
        self._barrier.wait(20)
        self._table[self.worker] = own
        self._barrier.wait(20)
        return list(self._table)


def on_each(workers: int, work: Callable[[int, StartExchange], Any]) -> list[Any]:
    """What each of so many workers gives, or raises."""
    table: list[Any] = [None] * workers
    barrier = threading.Barrier(workers)
    outcomes: list[Any] = [None] * workers

    def run(worker: int) -> None:
        try:
            outcomes[worker] = work(worker, StartExchange(Meeting(worker, table, barrier)))
        except BadInput as refusal:
            outcomes[worker] = refusal

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def newest(folders: list[Path]) -> list[Any]:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return on_each(
            len(folders), lambda worker, together: newest_of_all(CheckpointFolder(folders[worker]), together)
        )


def made(folder: Path, *versions: int) -> Path:
    for version in versions:
        CheckpointFolder(folder).save(version, some_state(version))
    return folder


def damage(folder: Path, version: int) -> None:
    os.truncate(folder / "checkpoints" / f"{version:08d}" / "state.json", 5)


@pytest.mark.parametrize("chunk_bytes", [7, 1 << 26])
def test_the_newest_that_anybody_sees_comes_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(resuming, "CHUNK_BYTES", chunk_bytes)
    folders = [made(tmp_path / "0", 1, 2), tmp_path / "1", made(tmp_path / "2", 8, 9), made(tmp_path / "3", 5)]
    for loaded in newest(folders):
        assert isinstance(loaded, Loaded) and loaded.version == 9
        assert same(loaded.state, some_state(9))


def test_a_damaged_one_is_passed_over_whoever_has_it(tmp_path: Path) -> None:
    own, shared = made(tmp_path / "own", 6, 9), made(tmp_path / "shared", 7, 8)
    damage(own, 9)
    assert {loaded.version for loaded in newest([shared, own, shared])} == {8}
    damage(shared, 8)
    damage(shared, 7)
    assert {loaded.version for loaded in newest([shared, own, shared])} == {6}
    damage(own, 6)
    assert newest([shared, own, shared]) == [None] * 3


def test_without_any_a_run_begins(tmp_path: Path) -> None:
    assert newest([tmp_path / "a", tmp_path / "b"]) == [None, None]


def test_a_newer_format_is_refused_everywhere(tmp_path: Path) -> None:
    other = made(tmp_path / "b", 4)
    manifest = other / "checkpoints" / "00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 2'))
    first, second = newest([tmp_path / "a", other])
    assert "is of schema 2, but this release reads only 1" in str(second)
    assert str(first) == f"process 1: {second}"


def test_a_folder_that_cannot_be_read_is_said_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "a", 1)
    real = Path.iterdir

    def refused(path: Path) -> Any:
        if path == folder / "checkpoints" and threading.current_thread().name.startswith("Thread"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    for outcome in newest([folder, tmp_path / "b"]):
        assert "cannot be read (Permission denied); give checkpoint= another one" in str(outcome)


# ------------------------------------------------------------ whole scripts


def test_more_processes_on_other_disks_go_on_where_fewer_stopped(tmp_path: Path) -> None:
    before = Script(tmp_path / "0")
    for version in range(1, 4):
        before.iteration(version)
    before.saver.close()
    shutil.move(tmp_path / "0", tmp_path / "2")  # the machine of worker 0 is now that of worker 2
    scripts = [Script(tmp_path / str(worker), seed=worker, worker=worker) for worker in range(4)]
    started = on_each(4, lambda worker, together: start_saving(lambda: scripts[worker].saver, together))
    assert [resumed for _, resumed in started] == [Resumed(3, {"place": 3})] * 4
    for script in scripts:
        assert same(script.everything(), before.everything())
    scripts[0].iteration(4)
    scripts[0].saver.close()
    assert CheckpointFolder(tmp_path / "0").versions() == [4]
    torch.manual_seed(0)


def test_what_one_process_refuses_all_refuse(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / "run", tmp_path / "b"]
    scripts: list[Callable[[], Any]] = [lambda: Script(places[0]).saver, lambda: Script(places[1], worker=1).saver]
    first, second = on_each(2, lambda worker, together: start_saving(scripts[worker], together))
    assert "cannot be written into" in str(first)
    assert str(second) == f"process 0: {first}"


def test_a_checkpoint_of_another_model_is_refused_on_all(tmp_path: Path) -> None:
    before = Script(tmp_path)
    before.iteration(1)
    before.saver.close()
    scripts = [Script(tmp_path, worker=worker, width=5) for worker in range(2)]
    outcomes = on_each(2, lambda worker, together: start_saving(lambda: scripts[worker].saver, together))
    for outcome in outcomes:
        assert "of another model: tensor '0.weight' has shape (4, 3) there, (5, 3) here" in str(outcome)


def test_a_folder_in_some_processes_only_is_refused_on_all(tmp_path: Path) -> None:
    places = [tmp_path, None]

    def work(worker: int, together: StartExchange) -> Any:
        return saving_if_asked(together.group, torch.device("cpu"), places[worker], lambda: Script(tmp_path).saver)

    for outcome in on_each(2, work):
        assert str(outcome) == "process 0 has checkpoint=, but process 1 has not; give it in every process"


def test_something_to_save_without_a_folder_is_refused_on_all(tmp_path: Path) -> None:
    also: list[Any] = [None, {"scheduler": None}]

    def work(worker: int, together: StartExchange) -> Any:
        make = Script(tmp_path / str(worker)).saver  # two savers in one folder would sweep each other's files
        return saving_if_asked(together.group, torch.device("cpu"), None, lambda: make, also[worker])

    for outcome in on_each(2, work):
        assert "there is no checkpoint= to save it in" in str(outcome)


@pytest.mark.parametrize(
    ("shares", "restarts", "refused"), [("True", "2", True), ("True", "0", False), ("False", "2", False)]
)
def test_a_store_that_torchrun_shares_between_lives_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: str, restarts: str, refused: bool
) -> None:
    """A restart would hang in `init_process_group`."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    script = Script(tmp_path)
    (outcome,) = on_each(
        1, lambda _, together: saving_if_asked(together.group, torch.device("cpu"), tmp_path, lambda: script.saver)
    )
    assert isinstance(outcome, BadInput) == refused
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(outcome)) == refused
