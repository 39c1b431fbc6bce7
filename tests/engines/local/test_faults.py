"""Workers, the template and the whole run, hit where it hurts; and faults that no restart can mend."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate import checkpoint_schedule, stopping
from quorate.engines.local import fork_server
from quorate.engines.shared import worker_health
from quorate.engines.shared.real_time import LiveRun
from quorate.engines.shared.worker_health import AnswerTimes, SilenceLimits
from quorate.events import Arrived, Event, Ticket, WorkerJoined
from tests.engines.local.checking import EPOCHS, Watch, resume, train, versions_saved
from tests.engines.local.tasks import Disturbed, Mark, Mishap

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(40)]


def kill(engine: quorate.Local, *workers: int, number: int = signal.SIGKILL) -> None:
    processes = engine.processes()
    for worker in workers:
        os.kill(processes[worker], number)


def at(version: int, do: Callable[[], None]) -> Callable[[int], None]:
    """Do this once, after that update."""
    done: list[int] = []

    def on_update(made: int) -> None:
        if made >= version and not done:
            done.append(made)
            do()

    return on_update


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


# ------------------------------------------------------------ never an answer


@pytest.mark.parametrize(("what", "limit"), [("stop", "stopped"), ("sleep", "silent"), ("spin", "hanging")])
@pytest.mark.parametrize("where", ["load", "forward", "answer"])
def test_a_worker_that_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: str, limit: str
) -> None:
    """Each is found out by the limit that is meant for it; the others are far away."""
    limits = SilenceLimits(100.0, 100.0, 100.0)._replace(**{limit: 0.4})
    limits = limits._replace(stopped=min(limits))  # it is the first to be looked at
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: limits)
    watch, mark = Watch(), tmp_path / "mark"
    train(tmp_path, Disturbed(Mishap(where, what, str(mark))), quorate.FullSync(), quorate.Local(2), watch, epochs=1)
    assert Mark(mark)
    assert [tickets for _, tickets in watch.lost_workers] == [1]
    assert [incarnation for _, incarnation in watch.returned] == [1]


@pytest.mark.usefixtures("quick_returns")
@pytest.mark.parametrize("what", ["sleep", "stop"])
def test_a_batch_that_always_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: SilenceLimits(0.1, 0.1, 0.3))
    words = {"sleep": r"worker \d hung at batch \d+, 3 times; the last time it .* for \d+ s \(forward\); "}
    words["stop"] = r"workers died at batch \d+, 8 times; the last one, worker \d, was killed, since it was stopped"
    with pytest.raises(quorate.WorkerFailed, match=words[what]):
        quorate.train(Disturbed(Mishap("forward", what)), quorate.FullSync(), quorate.Local(2), epochs=1)


@pytest.mark.usefixtures("quick_returns")
def test_a_batch_that_always_hangs_is_not_called_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: SilenceLimits(0.1, 0.1, 0.3))
    message = ""
    try:
        quorate.train(Disturbed(Mishap("forward", "stop")), quorate.FullSync(), quorate.Local(2), epochs=1)
    except quorate.WorkerFailed as failed:
        message = str(failed)
    assert "workers died" in message
    assert "out of memory" not in message


@pytest.mark.usefixtures("impatient")
def test_a_worker_stopped_while_it_starts_is_replaced(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    train(tmp_path, Disturbed(Mishap("start", "stop", str(mark))), quorate.FullSync(), quorate.Local(2), Watch())
    assert Mark(mark)


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence that is shorter than a busy machine may need counts, too."""
    monkeypatch.setattr(worker_health, "_LEAST_PATIENCE_S", 0.1)


@pytest.mark.usefixtures("quick_returns", "little_patience")
@pytest.mark.parametrize(
    ("where", "what", "words"),
    [("start", "sleep", "while it started"), ("forward", "sleep", "at batch"), ("forward", "spin", "at batch")],
)
def test_patience_bounds_the_silence_before_the_first_answer(tmp_path: Path, where: str, what: str, words: str) -> None:
    """Without it, it would be borne for minutes."""
    task = Disturbed(Mishap(where, what, sample=None))
    with pytest.raises(quorate.WorkerFailed, match=rf"worker \d hung {words}.*, 3 times; the last time it .* \d+ s"):
        quorate.train(task, quorate.FullSync(), quorate.Local(2), epochs=1, patience_s=0.5, out=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "there is nothing to go on from"


@pytest.mark.usefixtures("little_patience")
def test_patience_bounds_the_silence_after_the_first_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch, mark = Watch(), tmp_path / "mark"
    task = Disturbed(Mishap("forward", "sleep", str(mark), sample=None, after=str(tmp_path / "run" / "trace.jsonl")))
    with pytest.warns(
        RuntimeWarning, match=r"^worker \d hung at batch \d+: it .* for \d+ s \(forward\); it was killed"
    ):
        train(tmp_path, task, quorate.FullSync(), quorate.Local(2), watch, patience_s=1.0)
    assert Mark(mark) and len(watch.lost_workers) >= 1
    assert "in happen\n" in capfd.readouterr().err, "where it hung"


def test_a_worker_that_never_gets_ready_can_be_interrupted(tmp_path: Path) -> None:
    """It may have much to load, so much patience is due; but a signal is heard."""
    mark = tmp_path / "mark"
    ask = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    ask.start()
    with pytest.raises(KeyboardInterrupt):
        quorate.train(
            Disturbed(Mishap("start", "sleep", str(mark))),
            quorate.FullSync(),
            quorate.Local(2),
            updates=2,
            out=tmp_path / "run",
        )
    ask.join()
    assert Mark(mark) and not (tmp_path / "run").exists()


@pytest.mark.timeout(20)
def test_a_killed_worker_is_missed_although_a_child_of_it_lives(tmp_path: Path) -> None:
    """As when a data set has processes of its own, and the system takes the worker for its memory."""
    watch, mark = Watch(), tmp_path / "mark"
    train(tmp_path, Disturbed(Mishap("forward", "fork", str(mark))), quorate.FullSync(), quorate.Local(2), watch)
    assert Mark(mark) and len(watch.lost_workers) == 1
    child = Mark(f"{mark}-child").pid
    state = fork_server.process_state(child)
    assert state is not None and state[0] != "Z", "the run stood still until the child was gone"
    os.kill(child, signal.SIGKILL)


def test_a_stopped_worker_is_noticed_by_a_main_process_that_is_busy() -> None:
    engine, watch = quorate.Local(3), Watch()
    watch.on_update = at(5, lambda: kill(engine, 0, number=signal.SIGSTOP))

    def busy(progress: quorate.Progress) -> None:
        time.sleep(0.12)

    quorate.train(Disturbed(), quorate.Async(), engine, updates=28, on_progress=busy, recorders=(watch,))
    assert [worker for worker, _ in watch.lost_workers] == [0]


# ------------------------------------------------------------ too few are left


def test_below_the_quorum_for_too_long(tmp_path: Path) -> None:
    """The one that is lost comes back so slowly that it does not come back: the run says so, and can be resumed."""
    engine, watch, mark = quorate.Local(3), Watch(), tmp_path / "broken"
    watch.on_update = at(4, lambda: (mark.touch(), kill(engine, 2)))
    task, policy = Disturbed(Mishap("start", "sleep", after=str(mark))), quorate.FullSync()
    with pytest.raises(quorate.QuorumLost) as lost:
        quorate.train(task, policy, engine, epochs=EPOCHS, out=tmp_path / "run", patience_s=0.4, recorders=(watch,))
    assert "full-sync needs 3 live workers, but only 2 of 3 are left" in str(lost.value)
    assert "none came back within 0.4 s" in str(lost.value)
    version = versions_saved(tmp_path)[-1]
    assert f"a checkpoint of version {version} is in" in lost.value.__notes__[0]
    resume(tmp_path, Disturbed(), policy, 3)


@pytest.mark.usefixtures("no_return")
@pytest.mark.parametrize("patience_s", [0, 0.3])
def test_all_workers_gone_for_good(tmp_path: Path, patience_s: float) -> None:
    engine, watch, policy = quorate.Local(3), Watch(), quorate.Async()
    watch.on_update = at(4, lambda: kill(engine, 0, 1, 2))
    with pytest.raises(quorate.QuorumLost, match="needs 1 live workers, but only 0 of 3"):
        quorate.train(
            Disturbed(), policy, engine, epochs=EPOCHS, out=tmp_path / "run", patience_s=patience_s, recorders=(watch,)
        )
    assert versions_saved(tmp_path)


def test_late_workers_are_waited_for(tmp_path: Path) -> None:
    """Below the quorum, but not for too long: nothing is lost but time."""
    engine, watch, mark = quorate.Local(2), Watch(), tmp_path / "mark"
    watch.on_update = at(4, lambda: kill(engine, 0))
    task = Disturbed(Mishap("start", "pause", str(mark), after=str(tmp_path / "run")))
    train(tmp_path, task, quorate.FullSync(), engine, watch, patience_s=20)
    assert Mark(mark) and watch.returned == [(0, 1)]


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


# ------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    watch, policy = Watch(), quorate.BackupSync(2, 1)
    watch.on_update = at(6, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    with pytest.raises(quorate.Interrupted, match=f"{number.name} ended the run after update 6") as ended:
        quorate.train(Disturbed(), policy, quorate.Local(3), epochs=EPOCHS, out=tmp_path / "run", recorders=(watch,))
    assert signal.getsignal(number) is before
    assert ended.value.result.summary["updates"] == 6 and ended.value.signal == number.name
    assert versions_saved(tmp_path)[-1] == 6
    end = list(quorate.read_trace(tmp_path / "run"))[-1]
    assert (end["event"], end["version"], end["reason"]) == ("end", 6, f"stopped by {number.name}")
    replayed = quorate.replay(tmp_path / "run", Disturbed())
    assert replayed.result.digest == ended.value.result.digest
    resume(tmp_path, Disturbed(), policy, 3)


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    watch, policy = Watch(), quorate.FullSync()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    watch.on_update = at(6, twice)
    with pytest.raises(KeyboardInterrupt) as ended:
        quorate.train(
            Disturbed(),
            policy,
            quorate.Local(3),
            epochs=EPOCHS,
            out=tmp_path / "run",
            checkpoint_every=2,
            recorders=(watch,),
        )
    assert not isinstance(ended.value, quorate.Interrupted) and watch.updates == 6
    resume(tmp_path, Disturbed(), policy, 3)


@pytest.mark.usefixtures("no_return")
def test_a_signal_is_heard_while_too_few_workers_are_there(tmp_path: Path) -> None:
    engine, policy = quorate.Local(3), quorate.FullSync()

    class Impatient(Watch):
        def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
            super().lost(time, worker, tickets)
            os.kill(os.getpid(), signal.SIGTERM)

    watch = Impatient()
    watch.on_update = at(4, lambda: kill(engine, 1))
    with pytest.raises(quorate.Interrupted, match="SIGTERM"):
        quorate.train(
            Disturbed(), policy, engine, epochs=EPOCHS, out=tmp_path / "run", patience_s=1000, recorders=(watch,)
        )
    assert versions_saved(tmp_path)


def test_a_signal_does_not_wait_for_ever_for_workers_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FINISH_S", 0.3)
    watch, policy, mark = Watch(), quorate.FullSync(), tmp_path / "hang"
    ask = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    watch.on_update = at(4, lambda: (mark.touch(), ask.start()))
    task = Disturbed(Mishap("forward", "sleep", sample=None, after=str(mark)))
    with pytest.raises(quorate.Interrupted, match="SIGINT"):
        quorate.train(task, policy, quorate.Local(3), epochs=EPOCHS, out=tmp_path / "run", recorders=(watch,))
    ask.join()
    assert quorate.replay(tmp_path / "run", Disturbed()).gradients
    resume(tmp_path, Disturbed(), policy, 3)


def test_a_signal_ends_a_run_that_hangs_before_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago it began: it is some 17 minutes by its clock."""
    monkeypatch.setattr(stopping, "FINISH_S", 0.1)
    monkeypatch.setattr(LiveRun, "clock", lambda self: 1000 + time.monotonic() - self._zero)
    task, policy = Disturbed(Mishap("forward", "sleep", sample=None)), quorate.FullSync()

    class Impatient(Watch):
        def started(self, time: float, ticket: Ticket) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(quorate.Interrupted, match="SIGTERM ended the run after update 0"):
        quorate.train(task, policy, quorate.Local(1), epochs=EPOCHS, out=tmp_path / "run", recorders=(Impatient(),))
    assert versions_saved(tmp_path) == [0]
    monkeypatch.undo()
    resume(tmp_path, Disturbed(), policy, 1)


class Endless(Disturbed):
    """Its evaluation never ends, from some version on."""

    evaluations, ask = 0, True

    def evaluate(self, model: Any) -> dict[str, float]:
        self.evaluations += 1
        if self.evaluations >= 3:
            if self.ask:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return super().evaluate(model)


@pytest.mark.timeout(40)
def test_a_signal_ends_an_evaluation_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FINISH_S", 0.1)
    before = signal.getsignal(signal.SIGALRM)
    policy = quorate.FullSync()
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        quorate.train(Endless(), policy, quorate.Local(1), epochs=EPOCHS, evaluate_every=1, out=tmp_path / "run")
    assert versions_saved(tmp_path)[-1] == 3
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) == before
    monkeypatch.undo()
    resume(tmp_path, Disturbed(), policy, 1)


@pytest.mark.timeout(40)
def test_a_signal_ends_a_last_evaluation_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins after the signal, when the checkpoint is written."""
    monkeypatch.setattr(stopping, "FINISH_S", 0.1)
    task, policy = Endless(), quorate.FullSync()
    task.evaluations, task.ask = 3, False
    watch = Watch()
    watch.on_update = at(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        quorate.train(
            *(task, policy, quorate.Local(1)),
            **{"epochs": EPOCHS, "evaluate_every": 1000, "out": tmp_path / "run", "recorders": (watch,)},
        )
    saved = versions_saved(tmp_path)[-1]
    assert saved in (2, 3)
    monkeypatch.undo()
    assert resume(tmp_path, Disturbed(), policy, 1).metrics.updates > saved


class Talkative(quorate.Local):
    """Always has something to say, but nothing that makes an update."""

    ghost: Ticket | None = None

    def start(self, ticket: Ticket) -> None:
        if self.ghost is None:
            self.ghost = ticket._replace(id=-1)
        super().start(ticket)

    def next_event(self, until: float | None) -> Event | None:
        event = super().next_event(self.now(0.0))
        return event or (None if self.ghost is None else Arrived(self.now(0.0), self.ghost))


def test_a_signal_is_heard_though_events_keep_coming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FINISH_S", 0.1)
    task = Disturbed(Mishap("forward", "sleep", sample=None))

    class Impatient(Watch):
        def started(self, time: float, ticket: Ticket) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(quorate.Interrupted, match="SIGTERM"):
        quorate.train(task, quorate.FullSync(), Talkative(1), epochs=1, recorders=(Impatient(),))


def test_a_signal_meant_for_workers_does_not_end_the_run(tmp_path: Path) -> None:
    """SIGTERM from outside ends a worker, which is replaced; SIGINT is the main process's."""
    engine, watch = quorate.Local(3), Watch()

    def signals() -> None:
        kill(engine, 0, number=signal.SIGINT)
        kill(engine, 1, number=signal.SIGTERM)

    watch.on_update = at(4, signals)
    train(tmp_path, Disturbed(seconds=0.005), quorate.FullSync(), engine, watch)
    assert [worker for worker, _ in watch.lost_workers] == [1]


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
