"""SIGINT and SIGTERM end a run with a checkpoint, also one that hangs, waits or is flooded with events."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate import stopping
from quorate.engines.shared.real_time import LiveRun
from quorate.events import Arrived, Event, Ticket
from tests.engines.local.checking import EPOCHS, Watch, at, kill, resume, train, versions_saved
from tests.engines.local.tasks import Disturbed, Mishap

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(40)]


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
