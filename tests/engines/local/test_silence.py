"""Workers that never answer, and runs with too few workers left: who is given up, when, and with which words."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import quorate
from quorate.engines.local import fork_server
from quorate.engines.shared import worker_health
from quorate.engines.shared.worker_health import AnswerTimes, SilenceLimits
from tests.engines.local.checking import EPOCHS, Watch, at, kill, resume, train, versions_saved
from tests.engines.local.tasks import Disturbed, Mark, Mishap

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(40)]


#: So long that no worker reaches it, however busy the machine is.
FAR_S = 100.0


# ------------------------------------------------------------ never an answer


@pytest.mark.parametrize(("what", "limit"), [("stop", "stopped"), ("sleep", "silent"), ("spin", "hanging")])
@pytest.mark.parametrize("where", ["load", "forward", "answer"])
def test_a_worker_that_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: str, limit: str
) -> None:
    """Each is found out by the limit that is meant for it; the others are far away.

    So are all of them while workers start: on a busy machine that may take longer than the limit.
    """
    far = SilenceLimits(FAR_S, FAR_S, FAR_S)
    limits = far._replace(**{limit: 0.4})
    limits = limits._replace(stopped=min(limits))  # it is the first to be looked at
    watch, mark = Watch(), tmp_path / "mark"
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: limits if mark.exists() and not watch.lost_workers else far)
    train(tmp_path, Disturbed(Mishap(where, what, str(mark))), quorate.FullSync(), quorate.Local(2), watch, epochs=1)
    assert Mark(mark)
    assert [tickets for _, tickets in watch.lost_workers] == [1]
    assert [incarnation for _, incarnation in watch.returned] == [1]


@pytest.mark.usefixtures("quick_returns")
@pytest.mark.parametrize("what", ["sleep", "stop"])
def test_a_batch_that_always_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    limits = SilenceLimits(stopped=0.1, silent=0.5 if what == "sleep" else FAR_S, hanging=FAR_S)
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: limits)
    words = {"sleep": r"worker \d hung at batch \d+, 3 times; the last time it .* for \d+ s \(forward\); "}
    words["stop"] = r"workers died at batch \d+, 8 times; the last one, worker \d, was killed, since it was stopped"
    with pytest.raises(quorate.WorkerFailed, match=words[what]):
        quorate.train(Disturbed(Mishap("forward", what)), quorate.FullSync(), quorate.Local(2), epochs=1)


@pytest.mark.usefixtures("quick_returns")
def test_a_batch_that_always_hangs_is_not_called_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: SilenceLimits(0.1, FAR_S, FAR_S))
    message = ""
    try:
        quorate.train(Disturbed(Mishap("forward", "stop")), quorate.FullSync(), quorate.Local(2), epochs=1)
    except quorate.WorkerFailed as failed:
        message = str(failed)
    assert "workers died" in message
    assert "out of memory" not in message


def test_a_worker_stopped_while_it_starts_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerTimes, "limits", lambda *_: SilenceLimits(0.3, FAR_S, FAR_S))
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
    patience_s = 0.5 if where == "start" else 2.0  # a start is to end in time also on a busy machine
    task = Disturbed(Mishap(where, what, sample=None))
    with pytest.raises(quorate.WorkerFailed, match=rf"worker \d hung {words}.*, 3 times; the last time it .* \d+ s"):
        quorate.train(task, quorate.FullSync(), quorate.Local(2), epochs=1, patience_s=patience_s, out=tmp_path / "run")
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

    def ask_once_it_starts() -> None:
        while not mark.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    ask = threading.Thread(target=ask_once_it_starts, daemon=True)
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
