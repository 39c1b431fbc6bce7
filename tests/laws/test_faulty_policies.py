"""The laws can fail: the checker must catch each fault that these tests put into a policy."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from quorate.errors import QuorumLost
from quorate.events import Action, Apply, Cancel, Drop, Event, Start, Ticket
from quorate.policies import Async, BackupSync, BoundedStaleness, Delayed, FullSync, KBatchSync, Policy, SoftSync
from tests.laws.chaos import run_chaos
from tests.laws.checker import LawChecker, SpreadChecker

Mutation = Callable[[list[Action]], list[Action]]


def mutated(policy: Policy, change: Mutation) -> Policy:
    """The policy with its actions tampered with."""
    original = type(policy)

    class Mutant(original):  # type: ignore[misc, valid-type]
        def handle(self, event: Event) -> list[Action]:
            return change(super().handle(event))

    policy.__class__ = Mutant
    return policy


def on_apply(change: Callable[[Apply], Apply]) -> Mutation:
    return lambda actions: [change(action) if isinstance(action, Apply) else action for action in actions]


def without_kind(kind: type) -> Mutation:
    return lambda actions: [action for action in actions if not isinstance(action, kind)]


class CountsLateArrivals(BackupSync):
    """An old bug of TensorFlow: a gradient of an older version fills the quorum."""

    def arrived(self, time: float, ticket: Ticket) -> list[Action]:
        return super().arrived(time, ticket._replace(version=self.version))


class OneTooFew(BackupSync):
    @property
    def per_update(self) -> int:
        return max(1, self.quorum - 1)


class IgnoresItsBound(Async):
    def _decide(self, ticket: Ticket) -> Action:
        bound, self.max_staleness = self.max_staleness, None
        action = super()._decide(ticket)
        self.max_staleness = bound
        return action


class RunsFurtherAhead(BoundedStaleness):
    def go_on(self, worker: int) -> list[Action]:
        return [self.start(worker)]


class ReadsTheNewest(Delayed):
    def _start_free(self, workers: list[int]) -> list[Action]:
        starts = super()._start_free(workers)
        return [start._replace(version=self.version) if isinstance(start, Start) else start for start in starts]


class ForgetsTheLost(FullSync):
    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> list[Action]:
        return []


class NeverTakesWhatIsLeft(KBatchSync):
    def exhausted(self, time: float, worker: int) -> list[Action]:
        self.stop(worker)
        return []


class DoesNotRestart(SoftSync):
    def go_on(self, worker: int) -> list[Action]:
        return []


FAULTS: dict[str, tuple[Callable[[], Policy], int]] = {
    "counts late arrivals": (lambda: CountsLateArrivals(2, 2, late="finish"), 4),
    "closes one too early": (lambda: _checked_as(OneTooFew(3, 1), BackupSync(3, 1)), 4),
    "ignores its staleness bound": (lambda: IgnoresItsBound(1), 4),
    "reads the newest version": (lambda: ReadsTheNewest(2), 3),
    "keeps the dead alive": (lambda: ForgetsTheLost(), 3),
    "hangs at the end of an epoch": (lambda: NeverTakesWhatIsLeft(5), 3),
    "lets workers stand idle": (lambda: DoesNotRestart(3), 2),
    "forgets to drop": (lambda: mutated(BackupSync(2, 2, late="finish"), without_kind(Drop)), 4),
    "forgets to cancel": (lambda: mutated(BackupSync(2, 2), without_kind(Cancel)), 4),
    "applies twice": (
        lambda: mutated(Async(), lambda actions: [x for a in actions for x in ([a, a] if type(a) is Apply else [a])]),
        3,
    ),
    "leaves one out": (lambda: mutated(FullSync(), on_apply(lambda a: a._replace(tickets=a.tickets[1:]))), 3),
    "applies one of a pair": (lambda: mutated(SoftSync(2), on_apply(lambda a: a._replace(tickets=a.tickets[:1]))), 3),
    "gives no reason": (lambda: mutated(FullSync(), on_apply(lambda a: a._replace(reason=""))), 2),
    "starts a version too far back": (
        lambda: mutated(
            FullSync(), lambda actions: [a._replace(version=0) if isinstance(a, Start) else a for a in actions]
        ),
        2,
    ),
}


def _checked_as(policy: Policy, honest: Policy) -> Policy:
    """Let the checker take its expectations from the policy that this one claims to be."""
    policy.__dict__["honest"] = honest
    return policy


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_in_a_policy_is_caught(fault: str) -> None:
    make, workers = FAULTS[fault]
    random = Random(fault)
    for _ in range(60):
        policy = make()
        checker = LawChecker(getattr(policy, "honest", policy), workers, batches=12, epochs=2)
        choices = [random.randrange(480) for _ in range(120)]
        try:
            run_chaos(policy, workers, choices, [checker])
        except (AssertionError, KeyError, QuorumLost):
            return  # the checker, the coordinator or the engine noticed
    pytest.fail(f"nobody noticed that the policy {fault}")


def test_running_ahead_is_caught() -> None:
    random = Random(1)

    def run() -> None:
        for _ in range(60):
            choices = [random.randrange(480) for _ in range(120)]
            run_chaos(RunsFurtherAhead(1), 4, choices, [SpreadChecker(1)], lossy=False)

    with pytest.raises(AssertionError, match="too far ahead"):
        run()
