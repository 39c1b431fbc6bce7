"""The coordinator: decisions for processes that compute by themselves, and a trace like any other's."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import quorate
from quorate.coordinator import ALL_HAVE_FINISHED
from quorate.data_parallel.batches import FixedLedger
from quorate.data_parallel.control import Hub, Link
from quorate.data_parallel.coordinator_thread import CLOSED, CoordinatorThread
from quorate.data_parallel.ticket_matching import TicketMatching
from quorate.errors import BadInput, ProcessLost
from quorate.events import Abandoned, Arrived, Event, Rebound, Refused, Ticket
from quorate.ledger import Ledger
from quorate.metrics import metrics_of
from quorate.trace import Recorder, read_trace
from tests.data_parallel.fake_processes import LONG_S, Decided, PlayedHub, play_free_running
from tests.laws.checker import LawChecker, demand

pytestmark = pytest.mark.data_parallel

DECIDED = [
    quorate.BackupSync(3, 1),
    quorate.BackupSync(2, 2, late="finish"),
    quorate.Deadline(limit=0.002, min_quorum=2),
    quorate.Deadline(late="finish"),
    quorate.AdaptiveBackup(min_quorum=2),
]


class Laws(LawChecker):
    """Laws 1, 3 and 4. An endless ledger has no epochs, and a batch of a ticket that was given back comes again."""

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        demand(not self.flying and not self.arrived_tickets, "1: every ticket ends")


class Clock(Recorder):
    """Time never goes back."""

    def __init__(self) -> None:
        self.time = 0.0

    def __getattribute__(self, name: str) -> Any:
        if name in ("started", "arrived", "applied", "dropped", "cancelled", "abandoned", "lost", "ended", "evaluated"):
            return self._check
        return super().__getattribute__(name)

    def _check(self, time: float, *rest: object) -> None:
        assert time >= self.time
        self.time = time


def start_coordinator(
    policy: quorate.Policy, hub: PlayedHub, ledger: Ledger | None = None, laws: Recorder | None = None, **options: Any
) -> CoordinatorThread:
    checker = Laws(policy, hub.workers, 10**9, 1) if laws is None else laws
    coordinator = CoordinatorThread(
        policy,
        hub.workers,
        hub,  # type: ignore[arg-type]
        ledger=Ledger(None, 1) if ledger is None else ledger,
        recorders=(checker, Clock()),
        **options,
    )
    coordinator.start()
    return coordinator


def close_and_look(coordinator: CoordinatorThread, out: Path, wait_s: float = LONG_S) -> list[dict[str, Any]]:
    """Close, hold the trace against its replay and its metrics, and give its records."""
    coordinator.close(wait_s)
    assert coordinator.error is None
    assert quorate.replay(out).lines > 0
    metrics = metrics_of(out)
    assert metrics.updates == coordinator.metrics.updates
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(metrics.summary()))
    return list(read_trace(out))


# ---------------------------------------------------------------- where a quorum decides


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", DECIDED, ids=repr)
def test_every_version_is_made_of_gradients_of_the_one_before(
    policy: quorate.Policy, seed: int, tmp_path: Path
) -> None:
    hub = PlayedHub(4)
    coordinator = start_coordinator(policy, hub, decides=True, out=tmp_path)
    late = policy.late == "finish"
    play = Decided(hub, coordinator, [40, 40, 40, 40], seed=seed, finishes_late=late, slow=(3,), nan_every=9)
    play.play()
    records = close_and_look(coordinator, tmp_path)
    applies = [record for record in records if record["event"] == "apply"]
    worker_of = {record["ticket"]: record["worker"] for record in records if record["event"] == "start"}
    assert {record["version"]: [worker_of[one] for one in record["tickets"]] for record in applies} == play.members
    for version, members in play.members.items():  # the engine took nobody for a member who had nothing of that version
        assert set(members) <= play.offers[version - 1]
    assert len(applies) > 20
    assert all(record["apply_s"] == 0.001 for record in applies)
    events = Counter(record["event"] for record in records)
    assert events["refuse"] > 0
    if not late:
        assert events["abandon"] > 0


@pytest.mark.parametrize("policy", DECIDED[:3], ids=repr)
def test_uneven_numbers_of_batches_end_together(policy: quorate.Policy, tmp_path: Path) -> None:
    hub = PlayedHub(4)
    coordinator = start_coordinator(policy, hub, decides=True, out=tmp_path)
    late = policy.late == "finish"
    play = Decided(hub, coordinator, [10, 10, 60, 60], seed=1, finishes_late=late)
    play.play()
    records = close_and_look(coordinator, tmp_path)
    reasons = {process.over for process in play.processes}
    assert reasons == {records[-1]["reason"]}


def test_those_who_are_left_go_on_while_they_are_enough(tmp_path: Path) -> None:
    hub = PlayedHub(3)
    coordinator = start_coordinator(quorate.BackupSync(2, 1), hub, decides=True, out=tmp_path)
    play = Decided(hub, coordinator, [60, 5, 60], seed=3)
    play.play()
    records = close_and_look(coordinator, tmp_path)
    lost = next(index for index, record in enumerate(records) if record["event"] == "lost")
    after = [record for record in records[lost:] if record["event"] == "apply"]
    assert records[lost]["worker"] == 1
    assert len(after) > 20


def test_versions_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    hub = PlayedHub(4)
    coordinator = start_coordinator(quorate.BackupSync(3, 1), hub, decides=True, out=tmp_path, first_version=70)
    play = Decided(hub, coordinator, [20] * 4, seed=5, first_version=70)
    play.play()
    records = close_and_look(coordinator, tmp_path)
    assert records[0]["first_version"] == 70
    assert min(play.members) == 71
    assert max(play.members) == 70 + coordinator.metrics.updates


def test_the_decision_carries_the_reason_and_the_hyperparameters_of_who_is_furthest() -> None:
    hub = PlayedHub(2)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True)
    hub.say(0, "arrived", version=0, hyper=[{"lr": 0.1}], steps=3)
    hub.say(1, "arrived", version=0, hyper=[{"lr": 0.2}], steps=4)
    go = hub.told[1].get(timeout=LONG_S)
    assert go == {
        "kind": "go",
        "version": 1,
        "members": [0, 1],
        "reason": "quorum reached",
        "hyper": [{"lr": 0.2}],
    }
    coordinator.version_made(1, 0.1)
    for worker in range(2):
        hub.say(worker, "finished")
    coordinator.close()


# ---------------------------------------------------------------- where everybody is in every round


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("made", [True, False], ids=["made", "unsaid"])
@pytest.mark.parametrize("delay", [None, 0, 1, 2])
def test_free_running_processes_are_written_down(delay: int | None, made: bool, seed: int, tmp_path: Path) -> None:
    hub = PlayedHub(3)
    policy = quorate.FullSync() if delay is None else quorate.Delayed(delay)
    coordinator = start_coordinator(policy, hub, decides=False, out=tmp_path)
    play_free_running(hub, coordinator, [30, 30, 30], delay or 0, seed, made=made)
    assert hub.told[0].get(timeout=LONG_S) == {"kind": "over", "reason": ALL_HAVE_FINISHED}
    records = close_and_look(coordinator, tmp_path)
    assert coordinator.metrics.updates == 30
    assert not [record for record in records if record["event"] == "lost"]
    assert hub.told[0].empty()  # nobody was told what to do


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delay", [0, 2])
def test_free_running_processes_with_uneven_numbers_of_batches(delay: int, seed: int, tmp_path: Path) -> None:
    hub = PlayedHub(3)
    coordinator = start_coordinator(quorate.Delayed(delay), hub, decides=False, out=tmp_path)
    play_free_running(hub, coordinator, [20, 17, 25], delay, seed)
    over = hub.told[0].get(timeout=LONG_S)
    records = close_and_look(coordinator, tmp_path)
    assert coordinator.metrics.updates == 17
    assert records[-1]["reason"] == over["reason"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delay", [None, 1])
def test_who_has_no_batch_in_the_last_round_of_an_epoch_sits_it_out(
    delay: int | None, seed: int, tmp_path: Path
) -> None:
    hub = PlayedHub(3)
    policy = quorate.FullSync() if delay is None else quorate.Delayed(delay)
    laws = LawChecker(policy, 3, batches=10, epochs=2)
    coordinator = start_coordinator(policy, hub, FixedLedger(10, 1, 3), laws, decides=False, out=tmp_path)
    play_free_running(
        hub, coordinator, [8, 8, 8], delay or 0, seed, sits_out=lambda worker, round: round % 4 == 3 and worker > 0
    )
    hub.told[0].get(timeout=LONG_S)
    close_and_look(coordinator, tmp_path)
    assert coordinator.metrics.summary()["samples"] == {"applied": 20, "distinct": 10}


def test_a_gradient_with_nan_is_left_out_of_a_version_that_everybody_makes(tmp_path: Path) -> None:
    hub = PlayedHub(2)
    no_laws = Recorder()  # the quorum is not whole
    coordinator = start_coordinator(quorate.FullSync(), hub, laws=no_laws, decides=False, out=tmp_path)
    hub.say(0, "arrived", version=0)
    hub.say(1, "refused", version=0)
    coordinator.version_made(1, 0.1)
    for worker in range(2):
        hub.say(worker, "finished")
    hub.told[0].get(timeout=LONG_S)
    records = close_and_look(coordinator, tmp_path)
    assert [record["event"] for record in records if record["event"] in ("refuse", "apply")] == ["refuse", "apply"]


# ---------------------------------------------------------------- measures, ends and errors


def test_what_a_script_measures_is_in_the_trace(tmp_path: Path) -> None:
    hub = PlayedHub(1)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True, out=tmp_path)
    hub.say(0, "arrived", version=0)
    coordinator.version_made(1, 0.1)
    hub.say(0, "record", version=1, measures={"accuracy": 0.9})
    hub.say(0, "finished")
    assert [hub.told[0].get(timeout=LONG_S)["kind"] for _ in range(2)] == ["go", "over"]
    records = close_and_look(coordinator, tmp_path)
    assert [record["measures"] for record in records if record["event"] == "evaluate"] == [{"accuracy": 0.9}]
    assert coordinator.metrics.summary()["evaluation"] == {"accuracy": 0.9}


def test_what_a_script_measures_after_the_run_is_over_is_in_the_trace(tmp_path: Path) -> None:
    """Worker 0 has ended, so there is no quorum any more; worker 1 evaluates before it ends."""
    hub = PlayedHub(2)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True, out=tmp_path)
    for worker in range(2):
        hub.say(worker, "arrived", version=0)
    coordinator.version_made(1, 0.1)
    hub.say(0, "finished")
    assert [hub.told[1].get(timeout=LONG_S)["kind"] for _ in range(2)] == ["go", "over"]
    hub.say(1, "record", version=1, measures={"accuracy": 0.9})
    hub.say(1, "finished")
    records = close_and_look(coordinator, tmp_path)
    assert [record["event"] for record in records[-2:]] == ["evaluate", "end"]
    assert records[-2]["measures"] == {"accuracy": 0.9}


@pytest.mark.parametrize("last", ["lost", "silence"])
def test_nobody_waits_for_the_measures_of_a_process_that_is_gone(last: str, tmp_path: Path) -> None:
    hub = PlayedHub(2)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True, out=tmp_path)
    hub.say(0, "finished")
    assert hub.told[1].get(timeout=LONG_S)["kind"] == "over"
    if last == "lost":
        hub.say(1, "lost", why="worker 1 died")
    records = close_and_look(coordinator, tmp_path, wait_s=LONG_S if last == "lost" else 0.1)
    assert records[-1]["event"] == "end" and records[-1]["reason"] != CLOSED


def test_a_run_that_is_closed_early_has_an_end(tmp_path: Path) -> None:
    hub = PlayedHub(2)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True, out=tmp_path)
    hub.say(0, "arrived", version=0)
    records = close_and_look(coordinator, tmp_path, wait_s=0.0)
    assert records[-1]["reason"] == CLOSED
    coordinator.close()


def test_who_closes_waits_for_the_last_words_of_others(tmp_path: Path) -> None:
    hub = PlayedHub(2)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=False, out=tmp_path)
    hub.say(0, "arrived", version=0)
    hub.say(0, "finished")
    closing = threading.Thread(target=coordinator.close, args=(LONG_S,))
    closing.start()
    hub.say(1, "arrived", version=0)
    hub.say(1, "finished")
    closing.join()
    records = close_and_look(coordinator, tmp_path)
    assert records[-1]["reason"] == ALL_HAVE_FINISHED
    assert coordinator.metrics.updates == 1


def test_a_trace_whose_folder_was_deleted_is_written_again(tmp_path: Path) -> None:
    hub, out = PlayedHub(1), tmp_path / "trace"
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True, out=out)
    shutil.rmtree(out)
    hub.say(0, "finished")
    assert hub.told[0].get(timeout=LONG_S)["kind"] == "over"
    with pytest.warns(RuntimeWarning, match="was deleted during the run; it was made again"):
        coordinator.close(LONG_S)
    assert [record["event"] for record in read_trace(out)] == ["run", "join", "start", "cancel", "end"]
    assert (out / "summary.json").exists()


@pytest.mark.parametrize("while_making", [False, True])
def test_a_lost_process_breaks_the_run_off(while_making: bool, tmp_path: Path) -> None:
    hub = PlayedHub(2)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True, out=tmp_path)
    if while_making:
        hub.say(0, "arrived", version=0)
        hub.say(1, "arrived", version=0)
    hub.say(1, "lost", why="worker 1 (pid 7 on h) died")
    coordinator.close()
    assert isinstance(coordinator.error, ProcessLost)
    assert str(coordinator.error) == "worker 1 (pid 7 on h) died"
    with pytest.raises(BadInput, match="its run broke off"):
        metrics_of(tmp_path)


def test_gradients_that_hold_nan_again_and_again_end_the_run_for_all() -> None:
    hub = PlayedHub(1)
    coordinator = start_coordinator(quorate.FullSync(), hub, decides=True)
    for _ in range(10):
        hub.say(0, "refused", version=0)
    coordinator._thread.join(LONG_S)
    coordinator.close()
    assert isinstance(coordinator.error, quorate.Diverged)
    assert hub.lost == [(0, f"worker 0 has ended the run: {coordinator.error}")]


@pytest.mark.parametrize(
    "policy",
    [quorate.Async(), quorate.SoftSync(2), quorate.BoundedStaleness(1), quorate.KBatchSync(4)],
    ids=repr,
)
def test_a_policy_that_cannot_be_run_is_refused_with_the_engines_that_can(policy: quorate.Policy) -> None:
    with pytest.raises(BadInput, match=f"cannot run policy '{policy.name}'.*use the local, ray or simulated engine"):
        CoordinatorThread(policy, 2, PlayedHub(2), decides=True, ledger=Ledger(None, 1))  # type: ignore[arg-type]


def test_a_quorum_above_the_processes_is_refused() -> None:
    with pytest.raises(BadInput, match="quorum is 3, but the run has 2 workers"):
        CoordinatorThread(quorate.BackupSync(3), 2, PlayedHub(2), decides=True, ledger=Ledger(None, 1))  # type: ignore[arg-type]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    def coordinator(out: Path) -> CoordinatorThread:
        hub: Any = PlayedHub(1)
        return CoordinatorThread(quorate.FullSync(), 1, hub, decides=True, ledger=Ledger(None, 1), out=out)

    (tmp_path / "trace.jsonl").write_text("old")
    with pytest.raises(BadInput, match=r"already holds a run \(trace.jsonl\); name another"):
        coordinator(tmp_path)
    with pytest.raises(BadInput, match=r"out is .* which is a file; name a new folder"):
        coordinator(tmp_path / "trace.jsonl")


# ---------------------------------------------------------------- which ticket is meant


def ticket(number: int, version: int, worker: int = 0) -> Ticket:
    return Ticket(number, worker, 0, version, number, 1)


def said(book: TicketMatching, kind: str, version: int) -> list[Event]:
    return list(book.said(5.0, 0, {"kind": kind, "version": version}))


@pytest.fixture
def book() -> TicketMatching:
    return TicketMatching(1, None, in_order=False)


def test_what_comes_before_its_ticket_is_kept_for_it(book: TicketMatching) -> None:
    assert said(book, "arrived", 0) == []
    assert book.ready_events(6.0) == []
    book.start(ticket(0, 0))
    assert book.ready_events(6.0) == [Arrived(5.0, ticket(0, 0))]
    assert book.ready_events(6.0) == []


@pytest.mark.parametrize("kind", ["arrived", "abandoned", "refused"])
def test_what_comes_for_a_cancelled_ticket_is_that_ones_last_word(book: TicketMatching, kind: str) -> None:
    old, new = ticket(0, 0), ticket(1, 1)
    book.start(old)
    book.cancel(old, 3.0)
    book.version = 1
    book.start(new)
    assert said(book, kind, 0) == [Abandoned(5.0, old, 2.0)]
    assert said(book, "arrived", 1) == [Arrived(5.0, new)]


def test_tickets_that_were_never_begun_are_forgotten(book: TicketMatching) -> None:
    for version in range(5):
        book.version = version
        book.start(started := ticket(version, version))
        book.cancel(started, 1.0)
    assert len(said(book, "abandoned", 3)) == 1
    assert said(book, "abandoned", 2) == []


def test_late_work_that_is_left_to_finish_arrives(book: TicketMatching) -> None:
    book.start(late := ticket(0, 0))
    book.version = 2
    assert said(book, "arrived", 0) == [Arrived(5.0, late)]


def test_a_process_that_went_on_from_a_newer_version_brings_the_older_ticket_first(book: TicketMatching) -> None:
    book.start(older := ticket(0, 2))
    book.version = 3
    assert said(book, "arrived", 3) == [Arrived(5.0, older)]  # which the policy drops, since its version is over
    book.start(newer := ticket(1, 3))
    assert book.ready_events(6.0) == [Arrived(5.0, newer)]


def test_a_process_that_went_on_from_the_version_before_has_its_ticket_renewed(book: TicketMatching) -> None:
    book.version = 3
    book.start(older := ticket(0, 3))
    assert said(book, "arrived", 2) == [Rebound(5.0, older)]
    book.cancel(older, 5.0)
    book.start(newer := ticket(1, 3))
    assert said(book, "arrived", 3) == [Arrived(5.0, newer)]


def test_a_process_that_gives_up_work_that_is_not_late_has_its_ticket_renewed(book: TicketMatching) -> None:
    book.start(given_up := ticket(0, 0))
    assert said(book, "abandoned", 0) == [Rebound(5.0, given_up)]


def test_a_refused_gradient_is_refused(book: TicketMatching) -> None:
    book.start(bad := ticket(0, 0))
    assert said(book, "refused", 0) == [Refused(5.0, bad)]


# ---------------------------------------------------------------- with real sockets


def test_a_coordinator_decides_over_a_real_hub(tmp_path: Path) -> None:
    store = HashStore()
    hub = Hub(3)
    hub.publish(store)
    told = PlayedHub(3)
    links = [Link(worker, store, told.told[worker].put, lambda error: None) for worker in range(3)]
    coordinator = CoordinatorThread(
        quorate.BackupSync(2, 1), 3, hub, decides=True, ledger=Ledger(None, 1), out=tmp_path
    )
    coordinator.start()
    for version in range(5):
        for link in links[:2]:
            link.send("arrived", version=version)
        for worker in range(3):
            go = told.told[worker].get(timeout=LONG_S)
            assert (go["kind"], go["version"], sorted(go["members"])) == ("go", version + 1, [0, 1])
        coordinator.version_made(version + 1, 0.1)
    for link in links:
        link.send("finished")
    assert told.told[2].get(timeout=LONG_S) == {"kind": "over", "reason": ALL_HAVE_FINISHED}
    for link in links:
        link.close()
    close_and_look(coordinator, tmp_path)
    hub.close()
    assert coordinator.metrics.updates == 5
