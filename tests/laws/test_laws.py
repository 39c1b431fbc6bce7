"""The laws of DESIGN.md, for every policy, over random arrival orders, losses and returns."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quorate
from quorate.events import Action, Event
from quorate.ledger import Ledger, Loan
from quorate.policies import (
    POLICIES,
    AdaptiveBackup,
    Async,
    BackupSync,
    BoundedStaleness,
    Deadline,
    Delayed,
    FullSync,
    KBatchSync,
    Policy,
    SoftSync,
    build_policy,
)
from tests.laws.chaos import Log, run_chaos
from tests.laws.checker import LawChecker, SpreadChecker

CHOICES = st.lists(st.integers(0, 8 * 60), max_size=150)


@st.composite
def policies(draw: st.DrawFn) -> tuple[Policy, int]:
    """Any policy, with workers to run it."""
    kind = draw(st.sampled_from(sorted(POLICIES)))
    workers = draw(st.integers(1, 6))
    late = draw(st.sampled_from(["cancel", "finish"]))
    weights = draw(st.booleans())
    if kind == "backup":
        quorum = draw(st.integers(1, workers))
        return BackupSync(quorum, workers - quorum, late), workers
    if kind == "async":
        return Async(draw(st.none() | st.integers(0, 4)), weights), workers
    if kind == "softsync":
        return SoftSync(draw(st.integers(1, 8)), weights), workers
    if kind == "bounded":
        return BoundedStaleness(draw(st.integers(0, 3)), weights), workers
    if kind == "k-batch":
        return KBatchSync(draw(st.integers(1, 8)), late), workers
    if kind == "delayed":
        return Delayed(draw(st.integers(0, 3)), late, draw(st.sampled_from([0, 1, 2, 7, 20]))), workers
    if kind == "deadline":
        quorum = draw(st.integers(1, workers))
        limit = draw(st.none() | st.floats(0.1, 3))
        return Deadline(limit, quorum, draw(st.none() | st.integers(1, quorum)), late=late), workers
    if kind == "adaptive":
        noise_scale = draw(st.none() | st.floats(0, 100))
        explore = draw(st.sampled_from([0.02, 0.5]))  # rounds look further rarely or often
        return AdaptiveBackup(noise_scale, draw(st.integers(1, workers)), explore, late), workers
    quorum = draw(st.integers(1, workers))  # a new policy, with what `--workers N+b` gives it
    return build_policy(POLICIES[kind], POLICIES[kind].from_workers(quorum, workers - quorum)), workers


def check(policy: Policy, workers: int, choices: list[int], *, refusals: bool = False) -> None:
    checker = LawChecker(policy, workers, batches=12, epochs=2)
    ledger = run_chaos(policy, workers, choices, [checker], refusals=refusals)
    assert ledger.finished


@given(policies(), CHOICES)
def test_laws_1_to_5_hold_whatever_happens(chosen: tuple[Policy, int], choices: list[int]) -> None:
    check(*chosen, choices)


@given(policies(), CHOICES)
def test_laws_1_to_5_hold_with_refused_gradients(chosen: tuple[Policy, int], choices: list[int]) -> None:
    check(*chosen, choices, refusals=True)


@given(
    st.integers(2, 6), st.integers(1, 2), st.lists(st.integers(0, 8 * 60), min_size=100, max_size=400), st.booleans()
)
def test_laws_1_to_5_hold_for_a_quorum_that_changes(workers: int, least: int, choices: list[int], lossy: bool) -> None:
    """Long enough that quorums are chosen, rounds look further, and times run out."""
    policy = AdaptiveBackup(min_quorum=least, explore=0.5)
    checker = LawChecker(policy, workers, batches=100, epochs=2)
    assert run_chaos(policy, workers, choices, [checker], samples=200, lossy=lossy).finished


@given(policies(), CHOICES, st.data())
def test_law_5_there_is_progress_while_a_quorum_lives(
    chosen: tuple[Policy, int], choices: list[int], data: st.DataObject
) -> None:
    """Workers that are lost for good: as many as the policy does not need."""
    policy, workers = chosen
    spare = workers - policy.begin(workers).needed
    gone = data.draw(st.permutations(range(workers)))[: data.draw(st.integers(0, spare))]
    checker = LawChecker(policy, workers, batches=12, epochs=2)
    assert run_chaos(policy, workers, choices, [checker], lossy=False, gone=gone).finished


@given(st.integers(1, 6), st.integers(0, 3), CHOICES)
def test_law_4_nobody_runs_ahead(workers: int, bound: int, choices: list[int]) -> None:
    run_chaos(BoundedStaleness(bound), workers, choices, [SpreadChecker(bound)], lossy=False)


# ---------------------------------------------------------------- law 6: equal policies


def decisions(policy: Policy, workers: int, choices: list[int]) -> list[tuple[object, ...]]:
    log = Log()
    run_chaos(policy, workers, choices, [log])
    return log.entries


@given(st.integers(1, 6), CHOICES)
def test_law_6_backup_without_backups_is_full_sync(workers: int, choices: list[int]) -> None:
    assert decisions(BackupSync(workers, 0), workers, choices) == decisions(FullSync(), workers, choices)


@given(st.integers(1, 6), CHOICES)
def test_law_6_no_delay_is_full_sync(workers: int, choices: list[int]) -> None:
    assert decisions(Delayed(0), workers, choices) == decisions(FullSync(), workers, choices)


@given(st.integers(0, 6), st.integers(0, 40))
def test_a_delay_that_warms_up_only_grows_and_never_reads_an_earlier_version(delay: int, warm_up: int) -> None:
    delays = [Delayed(delay, warm_up=warm_up).delay_at(iteration) for iteration in range(60)]
    assert all(0 <= later - earlier <= 1 for earlier, later in pairwise(delays))
    assert delays[0] == 0 and set(delays[max(delay, warm_up) :]) == {delay}
    if warm_up > delay:  # it has its full length only when the warm-up is over, and each length for about as long
        lengths = [delays[:warm_up].count(length) for length in range(delay + 1)]
        assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 6), st.booleans(), CHOICES)
def test_law_6_softsync_of_one_is_async(workers: int, weights: bool, choices: list[int]) -> None:
    soft = decisions(SoftSync(1, weights), workers, choices)
    assert soft == decisions(Async(None, weights), workers, choices)


@given(st.integers(1, 6), CHOICES)
def test_a_deadline_that_never_comes_is_backup(workers: int, choices: list[int]) -> None:
    quorum = max(1, workers - 1)
    never = Deadline(limit=1e9, quorum=quorum, min_quorum=quorum)
    log_never, log_backup = decisions(never, workers, choices), None
    log_backup = decisions(BackupSync(quorum, workers - quorum), workers, choices)
    if not any(choice % 8 == 2 for choice in choices):  # a choice of 2 rings timers that backup does not have
        assert log_never == log_backup


# ---------------------------------------------------------------- law 7: two engines


@given(policies(), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_law_7_two_engines_given_the_same_arrivals_decide_the_same(
    chosen: tuple[Policy, int], seed: int, crashes: bool
) -> None:
    """A run in virtual time, with losses and returns, and its replay on the engine that reads events from the trace."""
    policy, workers = chosen
    engine = quorate.Simulated(workers, "lognormal:1,1*pauses:0.1,5", faults="crash:15,2" if crashes else None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        quorate.train(None, policy, engine, samples=43, batch_size=2, epochs=2, seed=seed, out=out)
        replayed = quorate.replay(out)
    assert not replayed.gradients
    assert replayed.lines > 43


# ---------------------------------------------------------------- law 8: resume


class Resumed(Policy):
    """A policy that is saved as JSON text and restored into a fresh object before every event."""

    def __init__(self, inner: Policy) -> None:
        self._configured = inner
        self.name = inner.name  # type: ignore[misc]
        self.history, self.weighs = inner.history, inner.weighs

    def begin(self, workers: int) -> Resumed:
        resumed = Resumed(self._configured)
        resumed._workers = workers
        resumed._inner = self._configured.begin(workers)
        return resumed

    def handle(self, event: Event) -> list[Action]:
        saved = json.loads(json.dumps(self._inner.state()))
        self._inner = self._configured.begin(self._workers)
        self._inner.restore(saved)
        return self._inner.handle(event)

    staleness_bound = property(lambda self: self._configured.staleness_bound)  # type: ignore[assignment]
    needed = property(lambda self: self._inner.needed)  # type: ignore[assignment]
    per_update = property(lambda self: self._inner.per_update)  # type: ignore[assignment]
    reset = arrived = refused = joined = lost = exhausted = pinned = None  # type: ignore[assignment]


class ResumedLedger(Ledger):
    """A ledger that is saved as JSON text and restored into a fresh object before every loan."""

    def borrow(self, round: int | None, worker: int | None = None) -> Loan | None:
        fresh = Ledger(self.samples, self.batch_size, self.epochs, self.seed)
        fresh.restore(json.loads(json.dumps(self.state())))
        loan = fresh.borrow(round, worker)
        self.restore(fresh.state())
        return loan


@given(policies(), CHOICES)
def test_law_8_resuming_at_every_event_changes_nothing(chosen: tuple[Policy, int], choices: list[int]) -> None:
    policy, workers = chosen
    log = Log()
    run_chaos(Resumed(policy), workers, choices, [log], ledger=ResumedLedger(23, 2, epochs=2, seed=7))
    assert log.entries == decisions(policy, workers, choices)


# ---------------------------------------------------------------- policies are values


@pytest.mark.parametrize(
    "policy", [FullSync(), BackupSync(2, 1), Async(3), Deadline(), Delayed(1), AdaptiveBackup()], ids=repr
)
def test_a_policy_is_not_changed_by_its_runs(policy: Policy) -> None:
    workers = 3
    before = vars(policy).copy()
    first = decisions(policy, workers, [9, 3, 77])
    assert vars(policy) == before
    assert decisions(policy, workers, [9, 3, 77]) == first
