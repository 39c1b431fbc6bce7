"""The driver's side of updates: which versions and gradients are alive, by number. It holds no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quorate.engines._kept import takes_norms
from quorate.engines.base import Job, Outcome
from quorate.engines.processes.blocks import Holds
from quorate.engines.processes.making import Prepared, Weights, mean_loss
from quorate.engines.ray.calling import ask, ask_all
from quorate.engines.ray.shard import Given, UpdateOrder, Verdict, weights_of
from quorate.errors import LearnerLost
from quorate.events import Ticket
from quorate.learner import norm_of_squares
from quorate.noise import Norms


@dataclass
class Version:
    """A version of the parameters: its block, the same in all shards, and objects for those who are elsewhere."""

    number: int
    block: int
    pieces: list[Any]  # one a shard; None: nobody has asked for it yet


@dataclass
class Gradient:
    """Room for a gradient: its block, the same in all shards. What comes from another node is an object at first."""

    block: int
    objects: list[Any] = field(default_factory=list)


class RoomForBlocks:
    """Hands out blocks: even ones for versions, odd ones for gradients, so that no block changes its role."""

    def __init__(self) -> None:
        self._versions, self._gradients = Holds(), Holds()

    def take(self, worker: int) -> Gradient:
        """Room for a gradient of this worker."""
        return Gradient(2 * _taken(self._gradients, worker) + 1)

    def take_version(self) -> int:
        return 2 * _taken(self._versions, None)

    def hold(self, version: Version) -> None:
        self._versions.hold(version.block // 2)

    def release(self, what: Version | Gradient) -> None:
        """One reason less to keep it. Objects of what nobody keeps are freed by Ray at once."""
        if what.block < 0:
            return  # given up for good
        holds = self._gradients if isinstance(what, Gradient) else self._versions
        holds.release(what.block // 2)

    @property
    def versions_alive(self) -> int:
        return self._versions.in_use


def _taken(holds: Holds, worker: int | None) -> int:
    number = holds.take(worker)
    if number is None:
        holds.add()
        number = holds.take(worker)
        assert number is not None
    return number


class Updater:
    """Keeps arrivals until they are applied, and lets the shards make versions of them.

    is_gone: whether the node of a shard is.
    """

    def __init__(
        self, job: Job, room: RoomForBlocks, shards: list[Any], first: int, is_gone: Callable[[], bool]
    ) -> None:
        self._room, self.shards, self._is_gone = room, shards, is_gone
        self.shard_lives: list[Any] = []  # references that are ready when a shard is gone
        self._history = job.policy.history
        self._clip = job.learning.clip_norm is not None
        self._compensation = job.learning.delay_compensation or 0.0
        # Whether a stale arrival is compared with the version it read, which must be kept for that.
        self._keeps_read = job.policy.staleness_bound != 0
        self._waiting: dict[int, Any] = {}  # arrivals whose version and gradient are those of this file
        self.newest = Version(0, first, [None] * len(shards))
        self.older: deque[Version] = deque()  # versions that tickets may yet start on, oldest first
        self.somebody_is_elsewhere: list[bool] = [False] * len(shards)  # whether a version is wanted as an object

    def version_block(self, version: int) -> Version:
        if version == self.newest.number:
            return self.newest
        return next(one for one in self.older if one.number == version)

    def piece(self, version: Version, shard: int) -> Any:
        """A reference to a part of a version."""
        if version.pieces[shard] is None:
            version.pieces[shard] = self.shards[shard].piece.remote(version.block)
        return version.pieces[shard]

    # ------------------------------------------------------------ arrivals

    def arrived(self, arrival: Any) -> None:
        if not self._keeps_read:
            self._room.release(arrival.version)
        self._waiting[arrival.ticket.id] = arrival

    def drop(self, ticket: Ticket) -> None:
        self._end(self._waiting.pop(ticket.id))

    def _end(self, arrival: Any) -> None:
        self._room.release(arrival.gradient)
        if self._keeps_read:
            self._room.release(arrival.version)

    def forget_all(self) -> None:
        """No arrival waits any more."""
        for ticket in [arrival.ticket for arrival in self._waiting.values()]:
            self.drop(ticket)

    def worth_folding_after(self) -> float | None:
        return None  # shards sum when they are told to

    def fold(self) -> None:
        raise AssertionError("nothing is summed ahead")

    # ------------------------------------------------------------ the update

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        arrivals = [self._waiting.pop(ticket.id) for ticket in tickets]
        if self._history:
            self.older.append(self.newest)
            self._room.hold(self.newest)
            while len(self.older) > self._history:
                self._room.release(self.older.popleft())
        target = self._room.take_version()
        order = UpdateOrder(
            version=self.newest.number,
            arrivals=tuple(self._given(arrival) for arrival in arrivals),
            weights=weights,
            target=target,
            publish=False,
        )
        try:
            verdict, pieces = self._only(order) if len(self.shards) == 1 else self._together(order)
        except LearnerLost:
            self._waiting |= {arrival.ticket.id: arrival for arrival in arrivals}  # for `forget_all`
            self._room.release(Version(-1, target, []))
            raise
        self._room.release(self.newest)
        self.newest = Version(order.version + 1, target, pieces)
        for arrival in arrivals:
            self._end(arrival)
        kept = [place for place in range(len(arrivals)) if place not in verdict.refused]
        loss = None
        if kept:
            loss = mean_loss([tickets[place] for place in kept], [arrivals[place].loss for place in kept])
        refused = tuple(tickets[place] for place in verdict.refused)
        return Outcome(loss, verdict.norm, refused, norms=verdict.norms)

    def _given(self, arrival: Any) -> Given:
        read = arrival.version.block if self._keeps_read else -1
        return Given(arrival.ticket, read, arrival.gradient.block, arrival.some_missing)

    def _only(self, order: UpdateOrder) -> tuple[Verdict, list[Any]]:
        """The model is in one shard, which sees everything."""
        (shard,), (publish,) = self.shards, self.somebody_is_elsewhere
        said: list[Any] = []

        def call() -> Any:
            said[:] = _called(shard.apply, order, publish)
            return said[0]

        verdict: Verdict = ask("the learner", call, self._is_gone)
        return verdict, [said[1]]

    def _together(self, order: UpdateOrder) -> tuple[Verdict, list[Any]]:
        """First every shard says what it has, then all of them do the same."""
        said = self._ask_shards([partial(shard.prepare.remote, order) for shard in self.shards])
        kept = list(range(len(order.arrivals)))
        if any(isinstance(one, list) for one in said):
            finite = [set(one) for one in said if isinstance(one, list)]
            kept = [place for place in kept if all(place in one for one in finite)]
            some = 0 < len(kept) < len(order.arrivals)
            said = self._keep(order, kept) if some else []
            if not said:
                kept = []
        tickets = [order.arrivals[place].ticket for place in kept]
        norm = norms = None
        if kept and self._clip:
            norm = norm_of_squares([value for one in said for value in one.mean])
        if kept and takes_norms(order.version, tickets, weights_of(order.weights, kept), self._compensation):
            first = norm_of_squares([value for one in said for value in one.first])
            mean = norm_of_squares([value for one in said for value in one.mean])
            norms = Norms(first * first, tickets[0].samples, mean * mean, sum(ticket.samples for ticket in tickets))
        pieces: list[Any] = [None] * len(self.shards)

        def commit(place: int) -> Any:
            shard, publish = self.shards[place], self.somebody_is_elsewhere[place]
            done, pieces[place] = _called(shard.commit, order, publish, kept, norm)
            return done

        self._ask_shards([partial(commit, place) for place in range(len(self.shards))])
        refused = tuple(place for place in range(len(order.arrivals)) if place not in kept)
        return Verdict(norm, norms, refused), pieces

    def _ask_shards(self, calls: list[Any]) -> list[Any]:
        return ask_all("a shard of the learner", calls, self._is_gone)

    def _keep(self, order: UpdateOrder, kept: list[int]) -> list[Prepared]:
        """What the shards say of those that are finite everywhere; nothing, if their mean is not."""
        calls = [partial(shard.keep.remote, order, kept) for shard in self.shards]
        said: list[Prepared | None] = self._ask_shards(calls)
        return [] if None in said else [one for one in said if one is not None]


def _called(method: Any, order: UpdateOrder, publish: bool, *more: Any) -> tuple[Any, Any]:
    """Call a method that makes a version: a reference to its answer, and one to the version, where that is wanted."""
    if not publish:
        return method.remote(order, *more), None
    said, piece = method.options(num_returns=2).remote(replace(order, publish=True), *more)
    return said, piece
