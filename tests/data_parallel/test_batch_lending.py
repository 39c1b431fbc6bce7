"""Every sample is applied exactly once per epoch, whoever is late, and nobody waits for ever."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.data_parallel.batches import FixedLedger, LendingLedger
from quorate.events import Ticket
from quorate.ledger import Ledger
from quorate.policies import AdaptiveBackup, BackupSync, Deadline, Delayed, FullSync, Policy
from quorate.trace import Recorder, TraceWriter, Update
from quorate.trace_replay import RecordedLedger, replay
from tests.data_parallel.fake_lending import run_world
from tests.laws.chaos import run_chaos
from tests.laws.checker import LawChecker

pytestmark = pytest.mark.data_parallel

BATCHES, PASSES = 12, 2
CHOICES = st.lists(st.integers(0, 4 * 60), max_size=400)


@st.composite
def crowds(draw: st.DrawFn, most_ahead: int) -> tuple[Policy, list[int]]:
    """A policy that decides who is in a round, and for each of its processes how far its DataLoader asks ahead."""
    workers = draw(st.integers(2, 6))
    quorum = draw(st.integers(1, workers))
    late = draw(st.sampled_from(["cancel", "finish"]))
    policy: Policy = BackupSync(quorum, workers - quorum, late)
    if draw(st.booleans()):
        policy = Deadline(draw(st.none() | st.floats(0.1, 5)), quorum, late=late)
    return policy, draw(st.lists(st.integers(0, most_ahead), min_size=workers, max_size=workers))


class Laws(LawChecker):
    """Without the law of the end: who asks ahead may leave something when the last pass is over."""

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        pass


# ---------------------------------------------------------------- the laws


@settings(max_examples=400)
@given(crowds(most_ahead=0), CHOICES, st.sampled_from([0, 0, 5]))
def test_each_sample_is_applied_exactly_once_per_epoch(
    crowd: tuple[Policy, list[int]], choices: list[int], refuses: int
) -> None:
    policy, ahead = crowd
    laws = LawChecker(policy, len(ahead), BATCHES, PASSES)
    _, _, applied = run_world(policy, choices, [laws], ahead=ahead, passes=PASSES, refuses=refuses)
    assert applied == laws.uses, "what processes applied is what their tickets say"


@settings(max_examples=400)
@given(crowds(most_ahead=4), CHOICES, st.sampled_from([0, 0, 5]), st.sampled_from([0, 0, 2]))
def test_with_loaders_that_ask_ahead_too_and_a_pass_ends_for_all_at_one_version(
    crowd: tuple[Policy, list[int]], choices: list[int], refuses: int, leaves: int
) -> None:
    policy, ahead = crowd
    laws = LawChecker(policy, len(ahead), BATCHES, PASSES)
    made: list[int] = []  # the version with which each epoch was used up

    class Ends(Recorder):
        def applied(self, time: float, update: Update) -> None:
            if len(laws.uses) == BATCHES * (len(made) + 1):
                made.append(update.version)

    options: dict[str, Any] = {"ahead": ahead, "passes": PASSES, "refuses": refuses, "leaves": leaves}
    world, _, applied = run_world(policy, choices, [laws, Ends()], **options)
    assert applied == laws.uses
    assert len({tuple(process.ends) for process in world.processes}) == 1
    if not refuses:
        assert world.processes[0].ends == made


@settings(max_examples=60)
@given(crowds(most_ahead=3), CHOICES, st.integers(1, 12))
def test_a_run_goes_on_from_what_its_ledger_saved(
    crowd: tuple[Policy, list[int]], choices: list[int], updates: int
) -> None:
    policy, ahead = crowd
    _, ledger, before = run_world(policy, choices, ahead=ahead, passes=PASSES, updates=updates)
    state = json.loads(json.dumps(ledger.state()))
    if state["epoch"] >= PASSES:
        return
    nobody_ahead = [0] * len(ahead)
    _, _, after = run_world(policy, choices, ahead=nobody_ahead, passes=PASSES, state=state)
    assert before + after == Counter(range(BATCHES * PASSES))


def test_a_policy_that_chooses_its_quorum_can_be_lent_to_as_well() -> None:
    laws = Laws(AdaptiveBackup(), 5, BATCHES, PASSES)
    _, _, applied = run_world(AdaptiveBackup(), range(0, 3000, 7), [laws], ahead=[0] * 5, passes=PASSES)
    assert applied == Counter(range(BATCHES * PASSES)) == laws.uses


# ---------------------------------------------------------------- replay


def write_trace(path: Path, policy: Policy, choices: list[int], ahead: list[int]) -> int:
    """The trace of a run with loans; gives how many tickets were rebound."""
    writer = TraceWriter(path)
    writer.run(
        {
            "policy": {"name": policy.name, **policy.options()},
            "engine": {"name": "collective", "arithmetic": None},
            "task": None,
            "workers": len(ahead),
            "seed": 7,
            "samples": 23,
            "batch_size": 2,
            "batches": "recorded",
            "learning": {},
            "updates": None,
            "epochs": None,
            "until": None,
            "evaluate_every": 1,
            "parameter_bytes": 0,
        }
    )
    try:
        world, _, _ = run_world(policy, choices, [writer], ahead=ahead, passes=PASSES)
    finally:
        writer.close()
    return world.rebounds


@settings(max_examples=40)
@given(crowds(most_ahead=2), CHOICES)
def test_a_replay_takes_the_batches_as_recorded(crowd: tuple[Policy, list[int]], choices: list[int]) -> None:
    policy, ahead = crowd
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(path, policy, choices, ahead)
        assert replay(path).lines > BATCHES


def test_some_of_these_traces_hold_tickets_that_were_rebound(tmp_path: Path) -> None:
    rebounds = write_trace(tmp_path / "trace.jsonl", BackupSync(2, 3), list(range(0, 4000, 11)), [1] * 5)
    assert rebounds > 0
    assert replay(tmp_path / "trace.jsonl").lines > BATCHES


def test_a_replay_notices_a_ticket_of_another_worker(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, BackupSync(2, 1), [], [0] * 3)
    ledger = RecordedLedger(path, 23, 2, 7)
    try:
        with pytest.raises(Exception, match="starts worker 2 where the trace goes on with worker 0"):
            ledger.borrow(0, 2)
    finally:
        ledger.close()


# ---------------------------------------------------------------- what is lent to whom


class Post:
    """What a ledger told the processes."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, worker: int, message: dict[str, Any]) -> None:
        self.sent.append((worker, message))

    def lent(self, worker: int) -> list[int]:
        return [message["batch"] for whose, message in self.sent if whose == worker and message["kind"] == "lent"]

    def kinds(self, worker: int) -> list[str]:
        return [message["kind"] for whose, message in self.sent if whose == worker]


def lending(samples: int = 8, workers: int = 2) -> tuple[LendingLedger, Post]:
    post = Post()
    return LendingLedger(samples, 1, workers, post), post


def borrowed(ledger: Ledger, round: int, worker: int) -> int | None:
    loan = ledger.borrow(round, worker)
    return None if loan is None else loan.batch


def spend(ledger: LendingLedger, worker: int, version: int, batch: int) -> None:
    assert not ledger.done(worker, version)
    ledger.spend([Ticket(0, worker, 0, version, batch, 1)])


def test_a_batch_that_was_begun_goes_to_somebody_else_when_its_ticket_is_cancelled() -> None:
    ledger, post = lending()
    assert [borrowed(ledger, 0, 0), borrowed(ledger, 0, 1)] == [0, 1]
    assert not ledger.began(0, 0)
    ledger.give_back(0)
    assert borrowed(ledger, 1, 0) == 2, "it does not have its own again where there is another"
    spend(ledger, 1, 0, 1)
    assert borrowed(ledger, 1, 1) == 0
    assert not ledger.done(0, 0), "what it computed in vain is over; its ticket is for the next"
    spend(ledger, 0, 1, 2)
    assert post.lent(0) == [0, 2]


def test_a_batch_that_was_not_begun_stays_where_it_is() -> None:
    ledger, post = lending()
    assert borrowed(ledger, 0, 0) == 0
    for version in (1, 2, 3):
        ledger.give_back(0)
        assert borrowed(ledger, version, 0) == 0
    assert post.lent(0) == [0]
    assert not ledger.began(0, 3)
    spend(ledger, 0, 3, 0)


def test_a_ticket_is_rebound_when_its_batch_turns_out_to_be_of_an_older_version() -> None:
    ledger, _ = lending()
    assert borrowed(ledger, 0, 0) == 0
    ledger.wanted(0, 2, 0, ask=1)
    spend(ledger, 0, 0, 0)
    assert borrowed(ledger, 1, 0) == 1
    ledger.give_back(1)
    assert borrowed(ledger, 2, 0) == 1, "nobody knows yet that it was begun"
    assert ledger.began(0, 1)
    ledger.give_back(1)
    assert borrowed(ledger, 2, 0) == 2
    assert not ledger.done(0, 1), "the first was in vain, and the ticket is not for it any more"
    spend(ledger, 0, 2, 2)


def test_who_holds_nothing_computes_what_it_is_lent_on_the_version_that_it_is_lent_for() -> None:
    ledger, post = lending(samples=3)
    assert [borrowed(ledger, 0, 0), borrowed(ledger, 0, 1)] == [0, 1]
    spend(ledger, 0, 0, 0)
    assert borrowed(ledger, 1, 0) == 2
    assert post.sent[-1][1]["version"] == 1
    assert not ledger.began(0, 0), "that was said before it got the batch"
    assert not ledger.began(0, 1)
    spend(ledger, 0, 1, 2)


def test_what_a_process_has_is_free_when_it_leaves() -> None:
    ledger, post = lending()
    assert borrowed(ledger, 0, 0) == 0
    ledger.wanted(0, 3, 0, ask=1)
    assert post.lent(0) == [0, 1, 2]
    ledger.left(0)
    ledger.lose(0)
    assert sorted(ledger.state()["returned"]) == [0, 1, 2]
    assert [borrowed(ledger, version, 1) for version in range(1)] == [1]


def test_a_process_without_a_ticket_is_lent_nothing_ahead() -> None:
    ledger, post = lending(samples=2)
    assert [borrowed(ledger, 0, 0), borrowed(ledger, 0, 1)] == [0, 1]
    spend(ledger, 1, 0, 1)
    assert borrowed(ledger, 1, 1) is None
    ledger.wanted(1, 2, 0, ask=1)
    ledger.began(0, 0)
    ledger.give_back(0)
    ledger.wanted(1, 2, 0, ask=2)
    assert post.kinds(1) == ["lent", "none", "none"]
    assert borrowed(ledger, 1, 1) == 0


def test_who_is_in_the_next_epoch_need_not_wait_for_the_last() -> None:
    ledger, post = lending(samples=2)
    assert [borrowed(ledger, 0, 0), borrowed(ledger, 0, 1)] == [0, 1]
    ledger.wanted(0, 2, epoch=0, ask=1)
    assert post.kinds(0) == ["lent", "none"]
    ledger.wanted(0, 2, epoch=1, ask=2)
    assert post.lent(0) == [0, 2]
    spend(ledger, 0, 0, 0)
    assert "epoch_over" not in post.kinds(0)
    spend(ledger, 1, 0, 1)
    assert post.kinds(1) == ["lent", "epoch_over"]


# ---------------------------------------------------------------- fixed batches


class Uses(Recorder):
    """Which batch each worker had in each round."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[int, int]]] = []

    def applied(self, time: float, update: Update) -> None:
        self.rows.append(sorted((ticket.worker, ticket.batch) for ticket in update.tickets))


@pytest.mark.parametrize("policy", [FullSync, lambda: Delayed(2)])
@given(CHOICES)
@settings(max_examples=25)
def test_seats_follow_from_the_round(policy: Callable[[], Policy], choices: list[int]) -> None:
    uses = Uses()

    class Ends(FixedLedger):
        """Says when three epochs are used up, as a script does by ending."""

        @property
        def finished(self) -> bool:
            return len(uses.rows) >= 3 * 3

    ledger = Ends(23, 2, 5, seed=7)
    ledger.epochs = 3
    run_chaos(policy(), 5, choices, [uses], lossy=False, ledger=ledger)
    expected = [
        [(worker, epoch * 12 + place * 5 + worker) for worker in range(5) if place * 5 + worker < 12]
        for epoch in range(3)
        for place in range(3)
    ]
    assert uses.rows[:9] == expected


def test_a_report_alone_tells_too_that_a_ticket_must_be_rebound() -> None:
    ledger, _ = lending()
    assert borrowed(ledger, 0, 0) == 0
    ledger.give_back(0)
    assert borrowed(ledger, 1, 0) == 0
    assert ledger.done(0, 0), "it was computed on version 0, and is over"
    ledger.give_back(0)
    assert borrowed(ledger, 1, 1) == 0
