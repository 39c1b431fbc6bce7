"""The laws of DESIGN.md as a recorder: it watches a run and raises when the run breaks a law."""

from __future__ import annotations

from collections import Counter

from quorate.events import Parts, Ticket
from quorate.policies import AdaptiveBackup, Async, BoundedStaleness, Deadline, Delayed, Policy
from quorate.policies.rounds import RoundPolicy
from quorate.trace import Recorder, Update


class LawBroken(AssertionError):  # noqa: N818 - it is a verdict
    """A run broke a law; the message says which law, and how."""


def demand(holds: bool, law: str) -> None:
    if not holds:
        raise LawBroken(law)


class LawChecker(Recorder):
    """Checks laws 1 to 4, event by event; law 2 also at the end. (Law 5 is that the run comes to its end.)"""

    def __init__(self, policy: Policy, workers: int, batches: int, epochs: int) -> None:
        self.policy = policy
        self.begun = policy.begin(workers)
        self.batches, self.epochs = batches, epochs
        self.version = 0
        self.flying: dict[int, Ticket] = {}
        self.arrived_tickets: dict[int, Ticket] = {}
        self.ended_tickets: set[int] = set()
        self.uses: Counter[int] = Counter()
        self.chosen = self.begun.per_update  # the quorum, for a policy that chooses it
        self.exhausted_at = -(10**9)  # version at which a worker last found no batch
        self.given_up = 0
        self.refusals: Counter[int] = Counter()
        self.clocks: Counter[int] = Counter()  # gradients applied, by worker
        self.incarnations: Counter[int] = Counter()
        self.workers_seen: set[int] = set()

    # ------------------------------------------------------------ law 1: every ticket ends exactly once

    def started(self, time: float, ticket: Ticket) -> None:
        demand(ticket.worker not in self.flying, "1: a worker has one ticket at a time")
        demand(self.version - self.policy.history <= ticket.version <= self.version, "3: a version that exists")
        self.flying[ticket.worker] = ticket

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        self.workers_seen.add(worker)
        self.incarnations[worker] += 1

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        demand(self.flying.pop(ticket.worker, None) == ticket, "1: what arrives was in flight")
        self.arrived_tickets[ticket.id] = ticket

    def _end(self, ticket: Ticket) -> None:
        demand(ticket.id not in self.ended_tickets, "1: a ticket ends once")
        self.ended_tickets.add(ticket.id)

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        demand(self.arrived_tickets.pop(ticket.id, None) == ticket, "1: what is dropped had arrived")
        demand(bool(reason), "a drop has a reason")
        self._end(ticket)

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        demand(self.flying.pop(ticket.worker, None) == ticket, "1: what is cancelled was in flight")
        self._end(ticket)

    def refused(self, time: float, ticket: Ticket) -> None:
        demand(self.flying.pop(ticket.worker, None) == ticket, "1: what is refused was in flight")
        self._end(ticket)
        self.refusals[ticket.batch] += 1
        self.given_up += self.refusals[ticket.batch] == 3

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        for ticket in tickets:
            here = self.flying.pop(worker, None) == ticket or self.arrived_tickets.pop(ticket.id, None) == ticket
            demand(here, "1: what is lost was open")
            self._end(ticket)

    def exhausted(self, time: float, worker: int) -> None:
        self.exhausted_at = self.version

    # ------------------------------------------------------------ laws 2 to 4: the gradients of a version

    def applied(self, time: float, update: Update) -> None:
        version, tickets, weights, reason = update[:4]
        demand(version == self.version + 1, "3: versions count one by one")
        demand(len(tickets) > 0, "3: a version is made of something")
        demand(bool(reason), "an update has a reason")
        demand(weights is None or len(weights) == len(tickets), "3: a weight for each")
        for ticket in tickets:
            demand(self.arrived_tickets.pop(ticket.id, None) == ticket, "1: what is applied had arrived")
            self._end(ticket)
            self.uses[ticket.batch] += 1
            demand(self.uses[ticket.batch] == 1, f"2: batch {ticket.batch} is applied once")
        self._check_quorum(tickets, reason)
        self._check_staleness(tickets)
        self.version = version

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        demand(version == self.version, "3: a choice is for the round that follows")
        demand(quorum >= 1 and bool(reason), "3: a choice has a quorum and a reason")
        self.chosen = quorum

    def _check_quorum(self, tickets: tuple[Ticket, ...], reason: str) -> None:
        full = self.chosen
        if isinstance(self.policy, AdaptiveBackup) and reason.startswith("looked further"):
            demand(len(tickets) >= self.policy.min_quorum, "3: at least the least when time is up")
        elif isinstance(self.policy, AdaptiveBackup) and reason in ("all live workers are in", "time is up"):
            demand(self.policy.min_quorum <= len(tickets), "3: at least the least when nobody else can come")
        elif "left" in reason:
            demand(len(tickets) <= full, "3: no more than the quorum")
            recently = self.version - self.exhausted_at <= self.policy.history
            demand(recently, "3: a short round only where the epoch ends")
        elif isinstance(self.policy, Deadline) and reason in ("time is up", "all live workers are in"):
            demand(self.begun.needed <= len(tickets) <= full, "3: at least the minimum when time is up")
        else:
            demand(len(tickets) == full, f"3: {len(tickets)} arrivals, but the quorum is {full}")
        if isinstance(self.policy, RoundPolicy):
            demand({ticket.version for ticket in tickets} == {self.version}, "3: all of the newest version")
        if isinstance(self.policy, Delayed):
            expected = self.version - self.policy.delay_at(self.version)
            demand({ticket.version for ticket in tickets} == {expected}, f"3: all of version {expected}")

    def _check_staleness(self, tickets: tuple[Ticket, ...]) -> None:
        bound = self.policy.staleness_bound
        stalest = max(self.version - ticket.version for ticket in tickets)
        demand(stalest >= 0, "4: no gradient of a version that does not exist yet")
        demand(bound is None or stalest <= bound, f"4: staleness {stalest} above {bound}")
        if isinstance(self.policy, Async | BoundedStaleness):
            demand(len(tickets) == 1, "3: one arrival, one update")
        if isinstance(self.policy, BoundedStaleness):
            # The gradients that one incarnation can deliver during one ticket of another worker, for each incarnation.
            most = (sum(self.incarnations.values()) - 1) * (2 * self.policy.bound + 1)
            demand(stalest <= max(0, most), f"4: staleness {stalest} above {most}")

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        demand(not self.flying and not self.arrived_tickets, "1: every ticket ends")
        demand(
            len(self.uses) + self.given_up == self.batches * self.epochs,
            f"2: {len(self.uses)} of {self.batches * self.epochs} batches were applied",
        )


class SpreadChecker(Recorder):
    """Bounded staleness without losses: no worker starts more than `bound` steps ahead of the slowest."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.clocks: dict[int, int] = {}

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        self.clocks[worker] = 0

    def started(self, time: float, ticket: Ticket) -> None:
        demand(self.clocks[ticket.worker] - min(self.clocks.values()) <= self.bound, "4: too far ahead")

    def applied(self, time: float, update: Update) -> None:
        for ticket in update.tickets:
            self.clocks[ticket.worker] += 1
