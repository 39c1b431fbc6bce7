"""Workers and the template are killed, and faults occur that no restart can mend."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate import checkpoint_schedule
from quorate.engines.local import fork_server
from quorate.events import Arrived, Event, Ticket, WorkerJoined
from tests.engines.local.checking import EPOCHS, Watch, at, kill, resume, train, versions_saved
from tests.engines.local.tasks import Disturbed, Mark, Mishap

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(40)]


def error_of(work: Callable[[], object]) -> type[BaseException] | None:
    """What kind of error it ends with. (An error that is kept keeps the run it came from.)"""
    try:
        work()
    except Exception as error:
        return type(error)
    return None


# ------------------------------------------------------------ killed


def test_a_worker_killed_while_it_waits_for_the_others(tmp_path: Path) -> None:
    engine, watch, killed = quorate.Local(3), Watch(), []

    def first_of_a_round(ticket: Ticket) -> None:
        if watch.updates == 2 and not killed:
            killed.append(ticket.worker)
            kill(engine, ticket.worker)

    watch.on_arrival = first_of_a_round
    train(tmp_path, Disturbed(seconds=0.02), quorate.FullSync(), engine, watch)
    # What it had delivered counts: it is lost without a ticket, or with one of the next round.
    assert [worker for worker, _ in watch.lost_workers] == killed
    assert watch.returned == [(killed[0], 1)]


@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.BackupSync(3, 1), quorate.Async()], ids=repr)
def test_all_workers_killed_at_once(tmp_path: Path, policy: quorate.Policy) -> None:
    engine, watch = quorate.Local(4), Watch()
    watch.on_update = at(4, lambda: kill(engine, 0, 1, 2, 3))
    train(tmp_path, Disturbed(seconds=0.005), policy, engine, watch)
    assert sorted(worker for worker, _ in watch.lost_workers) == [0, 1, 2, 3]
    assert watch.returned


@pytest.mark.usefixtures("no_return")
def test_nobody_waits_for_backups_that_are_gone(tmp_path: Path) -> None:
    """As many as there are backups die, and stay away: every round is still made, though no time to wait is given."""
    engine, watch = quorate.Local(4), Watch()
    watch.on_update = at(4, lambda: kill(engine, 1, 3))
    result = train(tmp_path, Disturbed(seconds=0.005), quorate.BackupSync(2, 2), engine, watch, patience_s=0)
    assert sorted(worker for worker, _ in watch.lost_workers) == [1, 3]
    assert watch.returned == []
    assert result.summary["updates"] == watch.updates <= EPOCHS * 7  # 13 batches, two an update


def test_the_template_killed(tmp_path: Path) -> None:
    """It takes its workers along; another is made, and makes others."""
    engine, watch = quorate.Local(3), Watch()

    def strike() -> None:
        assert engine._open is not None and engine._open.workers._pool._fork_server is not None
        os.kill(engine._open.workers._pool._fork_server.pid, signal.SIGKILL)

    watch.on_update = at(4, strike)
    train(tmp_path, Disturbed(seconds=0.005), quorate.FullSync(), engine, watch)
    assert sorted(worker for worker, _ in watch.lost_workers) == [0, 1, 2]
    assert sorted(watch.returned) == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.long
def test_the_template_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody misses it before a worker is lost; then it is given up."""
    monkeypatch.setattr(fork_server, "_START_TIMEOUT_S", 0.5)
    engine, watch = quorate.Local(2), Watch()

    def strike() -> None:
        assert engine._open is not None and engine._open.workers._pool._fork_server is not None
        os.kill(engine._open.workers._pool._fork_server.pid, signal.SIGSTOP)
        kill(engine, 0)

    watch.on_update = at(4, strike)
    train(tmp_path, Disturbed(seconds=0.005), quorate.FullSync(), engine, watch)
    assert {worker for worker, _ in watch.lost_workers} == {0, 1}


@pytest.mark.usefixtures("quick_returns")
def test_a_worker_killed_again_and_again(tmp_path: Path) -> None:
    """A life that ends before its first answer counts as a failure; that alone does not end a run."""
    engine, watch, killed = quorate.Local(2), Watch(), []

    class Again(Watch):
        def joined(self, time: float, worker: int, incarnation: int) -> None:
            super().joined(time, worker, incarnation)
            if worker == 0 and len(killed) < 6:
                killed.append(incarnation)
                kill(engine, 0)

    watch = Again()
    train(tmp_path, Disturbed(), quorate.FullSync(), engine, watch)
    assert killed == list(range(6)) and watch.returned == [(0, number) for number in range(1, 7)]


def test_faults_by_a_script(tmp_path: Path) -> None:
    engine, watch = quorate.Local(4, faults="lose:3@0.05;lose:1@0.1"), Watch()
    train(tmp_path, Disturbed(seconds=0.01), quorate.FullSync(), engine, watch)
    assert [worker for worker, _ in watch.lost_workers] == [3, 1]


def test_faults_for_a_worker_that_is_not_there() -> None:
    error = error_of(
        lambda: quorate.train(Disturbed(), quorate.FullSync(), quorate.Local(2, faults="lose:9@0"), updates=5)
    )
    assert error is quorate.BadInput


def test_faults_that_were_are_not_repeated_after_a_resume(tmp_path: Path) -> None:
    task, policy, watch = Disturbed(seconds=0.01), quorate.FullSync(), Watch()
    engine = quorate.Local(2, faults="lose:1@0.05")
    quorate.train(task, policy, engine, updates=15, out=tmp_path / "run", recorders=(watch,))
    assert watch.lost_workers == [(1, 1)]
    watch = Watch()
    quorate.resume(tmp_path / "run", task, updates=30, recorders=(watch,))
    assert len(watch.lost_workers) == 1 + 2, "the fault, and both workers at the resume"


# ------------------------------------------------------------ failing again and again


def test_a_worker_that_cannot_start_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    task = Disturbed(Mishap("start", "raise"))
    with pytest.raises(quorate.WorkerFailed, match=r"worker \d cannot start, 3 times:\nTraceback") as failed:
        quorate.train(task, quorate.FullSync(), quorate.Local(2), updates=2, out=tmp_path / "run")
    assert 'in model\n    self.meet("start")' in str(failed.value)
    assert "ArithmeticError: a mishap: start" in str(failed.value)
    assert not (tmp_path / "run").exists()


def test_a_worker_that_cannot_start_again_leaves_a_checkpoint(tmp_path: Path) -> None:
    engine, watch, mark = quorate.Local(2), Watch(), tmp_path / "broken"
    watch.on_update = at(4, lambda: (mark.touch(), kill(engine, 0)))
    task, policy = Disturbed(Mishap("start", "raise", after=str(mark))), quorate.FullSync()
    with pytest.raises(quorate.WorkerFailed, match="worker 0 cannot start, 3 times") as failed:
        quorate.train(task, policy, engine, epochs=EPOCHS, out=tmp_path / "run", recorders=(watch,))
    version = versions_saved(tmp_path)[-1]
    assert version >= 4
    assert f"a checkpoint of version {version} is in" in failed.value.__notes__[0]
    resume(tmp_path, Disturbed(), policy, 2)


@pytest.mark.parametrize("where", ["load", "prefetch"])
def test_a_bad_sample_is_named_with_its_worker(tmp_path: Path, where: str) -> None:
    """Also where a thread meets it first, loading ahead."""
    mark = str(tmp_path / "mark")
    mishaps = [Mishap("load", "raise", after=None if where == "load" else mark)]
    mishaps += [Mishap("prefetch", "raise", mark)] if where == "prefetch" else []
    task = Disturbed(*mishaps, load_s=0.001)
    with pytest.raises(quorate.WorkerFailed) as failed:
        quorate.train(task, quorate.FullSync(), quorate.Local(3), epochs=20)
    assert re.match(r"worker \d failed at batch \d+, 3 times:\nTraceback", str(failed.value))
    assert "ArithmeticError: a mishap" in str(failed.value)
    assert "(it was raised by sample 42 of the training data)" in str(failed.value)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_the_loss_comes_with_its_batch(where: str) -> None:
    with pytest.raises(quorate.WorkerFailed, match=r"worker \d failed at batch \d+, 3 times:\nTraceback") as failed:
        quorate.train(Disturbed(Mishap(where, "raise")), quorate.BackupSync(2, 1), quorate.Local(3), epochs=2)
    assert f"ArithmeticError: a mishap: {where}" in str(failed.value)


@pytest.mark.parametrize("policy", [quorate.BackupSync(3, 1), quorate.Async(), quorate.KBatchSync(2)], ids=repr)
def test_a_batch_that_always_crashes_ends_the_run(tmp_path: Path, policy: quorate.Policy) -> None:
    with pytest.raises(quorate.WorkerFailed) as failed:
        quorate.train(
            Disturbed(Mishap("forward", "segv")), policy, quorate.Local(4), epochs=EPOCHS, out=tmp_path / "run"
        )
    pattern = r"workers died at batch (\d+), 8 times; the last one, worker \d, was killed by SIGSEGV"
    assert re.fullmatch(pattern, str(failed.value))
    resume(tmp_path, Disturbed(), policy, 4)  # with the fault mended, it goes on


@pytest.mark.usefixtures("quick_returns")
def test_a_worker_that_leaves_by_itself_is_like_one_that_dies(tmp_path: Path) -> None:
    with pytest.raises(quorate.WorkerFailed, match=r"workers died at batch \d+, 8 times; .* ended with status 1"):
        quorate.train(Disturbed(Mishap("answer", "raise")), quorate.FullSync(), quorate.Local(2), epochs=1)


@pytest.mark.parametrize("where", ["start", "load", "backward"])
def test_an_exception_that_a_retry_survives_is_shown_once(tmp_path: Path, where: str) -> None:
    marks = [tmp_path / "first", tmp_path / "second"]
    task = Disturbed(*(Mishap(where, "raise", str(mark), sample=None) for mark in marks))
    with pytest.warns(RuntimeWarning) as warned:
        train(tmp_path, task, quorate.FullSync(), quorate.Local(3), Watch())
    assert all(Mark(mark) for mark in marks)
    (text,) = [str(one.message) for one in warned]
    begin = "while it started, and is started again" if where == "start" else r"at batch \d+, which is computed again"
    place = r'\(File ".*/tests/engines/local/tasks.py", line \d+, in happen\)'
    raised = rf"ArithmeticError: a mishap: {where} {place}; others of this kind are only counted"
    assert re.fullmatch(rf"worker \d failed {begin}: {raised}", text)


def test_the_first_death_is_shown_too(tmp_path: Path) -> None:
    task = Disturbed(Mishap("forward", "kill", str(tmp_path / "mark")))
    with pytest.warns(
        RuntimeWarning, match=r"worker \d was killed by SIGKILL \(out of memory\?\) at batch \d+"
    ) as warned:
        train(tmp_path, task, quorate.FullSync(), quorate.Local(2), Watch())
    assert len(warned) == 1


def test_an_exception_whose_text_cannot_be_encoded(tmp_path: Path) -> None:
    task = Disturbed(Mishap("forward", "surrogate", sample=None))
    with pytest.raises(quorate.WorkerFailed, match=r"failed at batch \d+, 3 times:\nTraceback") as failed:
        quorate.train(task, quorate.FullSync(), quorate.Local(2), epochs=1, out=tmp_path / "run")
    assert r"ArithmeticError: a mishap: \ud800" in str(failed.value)


# ------------------------------------------------------------ words from beyond


class Haunted(quorate.Local):
    """Says, once a lost worker is back, that the ticket which it lost has arrived after all."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.flying: dict[int, Ticket] = {}
        self.ghosts: list[Ticket] = []
        self.spoken: list[Event] = []

    def start(self, ticket: Ticket) -> None:
        self.flying[ticket.worker] = ticket
        super().start(ticket)

    def next_event(self, until: float | None) -> Event | None:
        if self.ghosts and self.flying[self.ghosts[0].worker] is not self.ghosts[0]:  # its next life has one of its own
            ghost = Arrived(self.now(0.0), self.ghosts.pop())
            self.spoken.append(ghost)
            return ghost
        event = super().next_event(until)
        if isinstance(event, WorkerJoined) and event.worker in self.flying:
            self.ghosts.append(self.flying[event.worker])
        return event


@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.Async(), quorate.BackupSync(2, 1)], ids=repr)
def test_arrivals_of_an_older_life_are_refused(tmp_path: Path, policy: quorate.Policy) -> None:
    engine, watch = Haunted(3), Watch()
    watch.on_update = at(4, lambda: kill(engine, 1))
    train(tmp_path, Disturbed(seconds=0.02), policy, engine, watch)
    assert len(engine.spoken) == 1 and len(watch.lost_workers) == 1


# ------------------------------------------------------------ errors in the main process


class Clumsy(Disturbed):
    def evaluate(self, model: Any) -> dict[str, float]:
        raise ZeroDivisionError("in the user's evaluate")


def test_an_error_of_the_main_process_comes_through_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    engine, policy = quorate.Local(3), quorate.FullSync()
    with pytest.raises(ZeroDivisionError, match="in the user's evaluate") as failed:
        quorate.train(Clumsy(), policy, engine, epochs=1, out=tmp_path / "run", evaluate_every=3)
    assert engine._open is None
    assert versions_saved(tmp_path)[-1] == 3, "the version that evaluate was to look at"
    assert failed.value.__notes__ == [f"(a checkpoint of version 3 is in {str(tmp_path / 'run')!r})"]
    resume(tmp_path, Disturbed(), policy, 3, epochs=1)


# ------------------------------------------------------------ checkpoints by time


def test_a_run_is_saved_after_its_first_update_and_then_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_schedule, "EVERY_S", 0.0)
    monkeypatch.setattr(checkpoint_schedule, "SHARE", 0.0)
    watch, seen = Watch(), set[int]()
    watch.on_update = lambda version: seen.update(versions_saved(tmp_path) if version > 1 else [])
    train(tmp_path, Disturbed(seconds=0.02), quorate.FullSync(), quorate.Local(2), watch)
    assert 1 in seen and len(seen) > 2


@pytest.mark.parametrize("every", [None, 1000])
def test_a_short_run_is_saved_once_and_at_its_end(tmp_path: Path, every: int | None) -> None:
    """Whoever says at which updates is not given others."""
    train(tmp_path, Disturbed(), quorate.FullSync(), quorate.Local(2), Watch(), checkpoint_every=every)
    assert versions_saved(tmp_path) == ([21] if every else [1, 21])
