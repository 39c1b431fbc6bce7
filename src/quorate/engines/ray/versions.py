"""The driver's bookkeeping of updates: which versions and gradients are alive, by number. It holds no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quorate.engines.base import Job, Outcome
from quorate.engines.ray.actors import ask, ask_all
from quorate.engines.ray.shard import ArrivalBlocks, UpdateOrder, UpdateResult
from quorate.engines.shared.shared_memory import Holds
from quorate.engines.shared.update import Prepared, Weights, mean_loss, takes_norms, weights_of
from quorate.errors import LearnerLost
from quorate.events import Ticket
from quorate.learner import norm_of_squares
from quorate.noise import Norms


@dataclass
class Version:
    """A version of the parameters: its block, which has the same number in all shards, and objects for other nodes."""

    number: int
    block: int
    pieces: list[Any]  # one object a shard; None: not requested yet


@dataclass
class GradientBlock:
    """Room for a gradient: a block with the same number in all shards."""

    block: int
    objects: list[Any] = field(default_factory=list)  # parts that are not yet in their shards on other nodes


class RoomForBlocks:
    """Hands out blocks: even numbers for versions, odd numbers for gradients, so that no block changes its role."""

    def __init__(self) -> None:
        self._versions, self._gradients = Holds(), Holds()

    def take(self, worker: int) -> GradientBlock:
        """A block for a gradient of this worker."""
        return GradientBlock(2 * _take(self._gradients, worker) + 1)

    def take_version(self) -> int:
        return 2 * _take(self._versions, None)

    def hold(self, version: Version) -> None:
        self._versions.hold(version.block // 2)

    def release(self, what: Version | GradientBlock) -> None:
        """Drop one hold. Ray frees objects as soon as they have no reference."""
        if what.block < 0:
            return  # the block is never used again
        holds = self._gradients if isinstance(what, GradientBlock) else self._versions
        holds.release(what.block // 2)


def _take(holds: Holds, worker: int | None) -> int:
    number = holds.take(worker)
    if number is None:
        holds.add()
        number = holds.take(worker)
        assert number is not None
    return number


class RayVersions:
    """Keeps arrivals until they are applied, and lets the shards make versions from them.

    is_gone: whether the node of a shard is lost.
    """

    def __init__(
        self, job: Job, room: RoomForBlocks, shards: list[Any], first: int, is_gone: Callable[[], bool]
    ) -> None:
        self._room, self.shards, self._is_gone = room, shards, is_gone
        self.shard_lives: list[Any] = []  # references that become ready when a shard dies
        self._history = job.policy.history
        self._clip = job.learning.clip_norm is not None
        self._compensation = job.learning.delay_compensation or 0.0
        # A stale arrival is compared with the version it was computed at, so that version is kept.
        self._keeps_read = job.policy.staleness_bound != 0
        self._waiting: dict[int, Any] = {}  # ticket id -> Arrival with a Version and a GradientBlock
        self.newest = Version(0, first, [None] * len(shards))
        self.older: deque[Version] = deque()  # versions that new tickets may start from, oldest first
        self.has_remote_workers: list[bool] = [False] * len(shards)  # whether a shard's part is needed as an object

    def version_block(self, version: int) -> Version:
        if version == self.newest.number:
            return self.newest
        return next(one for one in self.older if one.number == version)

    def piece(self, version: Version, shard: int) -> Any:
        """A reference to one shard's part of a version."""
        if version.pieces[shard] is None:
            version.pieces[shard] = self.shards[shard].piece.remote(version.block)
        return version.pieces[shard]

    # ------------------------------------------------------------ arrivals

    def arrived(self, arrival: Any) -> None:
        if not self._keeps_read:
            self._room.release(arrival.version)
        self._waiting[arrival.ticket.id] = arrival

    def drop(self, ticket: Ticket) -> None:
        self._release(self._waiting.pop(ticket.id))

    def _release(self, arrival: Any) -> None:
        self._room.release(arrival.gradient)
        if self._keeps_read:
            self._room.release(arrival.version)

    def forget_all(self) -> None:
        """Drop all waiting arrivals."""
        for arrival in self._waiting.values():
            self._release(arrival)
        self._waiting.clear()

    def worth_folding_after(self) -> float | None:
        return None  # the shards sum gradients only in an update

    def fold(self) -> None:
        raise AssertionError("nothing is summed ahead")

    # ------------------------------------------------------------ updates

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
            arrivals=tuple(
                ArrivalBlocks(
                    one.ticket, one.version.block if self._keeps_read else -1, one.gradient.block, one.some_missing
                )
                for one in arrivals
            ),
            weights=weights,
            target=target,
            publish=False,
        )
        try:
            result, pieces = self._in_one_shard(order) if len(self.shards) == 1 else self._in_all_shards(order)
        except LearnerLost:
            self._waiting |= {arrival.ticket.id: arrival for arrival in arrivals}  # for `forget_all`
            self._room.release(Version(-1, target, []))
            raise
        self._room.release(self.newest)
        self.newest = Version(order.version + 1, target, pieces)
        for arrival in arrivals:
            self._release(arrival)
        kept = [index for index in range(len(arrivals)) if index not in result.refused]
        loss = None
        if kept:
            loss = mean_loss([tickets[index] for index in kept], [arrivals[index].loss for index in kept])
        refused = tuple(tickets[index] for index in result.refused)
        return Outcome(loss, result.norm, refused, norms=result.norms)

    def _in_one_shard(self, order: UpdateOrder) -> tuple[UpdateResult, list[Any]]:
        """The update in a single shard, which makes all decisions itself."""
        pieces: list[Any] = [None]

        def call() -> Any:
            answer, pieces[0] = _call(self.shards[0].apply, order, self.has_remote_workers[0])
            return answer

        return ask("the learner", call, self._is_gone), pieces

    def _in_all_shards(self, order: UpdateOrder) -> tuple[UpdateResult, list[Any]]:
        """The update in two phases: every shard prepares its mean, then all shards commit with the same arrivals."""
        prepared = self._ask_shards([partial(shard.prepare.remote, order) for shard in self.shards])
        kept = list(range(len(order.arrivals)))
        finite = [set(one) for one in prepared if isinstance(one, list)]  # of shards whose mean is not finite
        if finite:
            kept = [index for index in kept if all(index in one for one in finite)]
            prepared = self._prepare_again(order, kept) if 0 < len(kept) < len(order.arrivals) else []
            if not prepared:
                kept = []
        tickets = [order.arrivals[index].ticket for index in kept]
        norm = norms = None
        if kept and self._clip:
            norm = norm_of_squares([value for one in prepared for value in one.mean])
        if kept and takes_norms(order.version, tickets, weights_of(order.weights, kept), self._compensation):
            first = norm_of_squares([value for one in prepared for value in one.first])
            mean = norm_of_squares([value for one in prepared for value in one.mean])
            norms = Norms(first * first, tickets[0].samples, mean * mean, sum(ticket.samples for ticket in tickets))
        pieces: list[Any] = [None] * len(self.shards)

        def commit(shard: int) -> Any:
            publish = self.has_remote_workers[shard]
            answer, pieces[shard] = _call(self.shards[shard].commit, order, publish, kept, norm)
            return answer

        self._ask_shards([partial(commit, shard) for shard in range(len(self.shards))])
        refused = tuple(index for index in range(len(order.arrivals)) if index not in kept)
        return UpdateResult(norm, norms, refused), pieces

    def _prepare_again(self, order: UpdateOrder, kept: list[int]) -> list[Prepared]:
        """The shards' means of the gradients that are finite in all shards; empty if a mean is not finite."""
        prepared = self._ask_shards([partial(shard.keep.remote, order, kept) for shard in self.shards])
        return [] if None in prepared else prepared

    def _ask_shards(self, calls: list[Any]) -> list[Any]:
        return ask_all("a shard of the learner", calls, self._is_gone)


def _call(method: Any, order: UpdateOrder, publish: bool, *more: Any) -> tuple[Any, Any]:
    """Call a shard's method that makes a version: references to the answer and, if `publish`, to the version."""
    if not publish:
        return method.remote(order, *more), None
    answer, piece = method.options(num_returns=2).remote(replace(order, publish=True), *more)
    return answer, piece
