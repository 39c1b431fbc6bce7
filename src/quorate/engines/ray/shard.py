"""A shard of the learner: some of the model's tensors, with their optimizer, on one node."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ray
import torch
from torch import nn

from quorate.checkpoint import check_can_save
from quorate.engines.ray.task_transfer import explained, unpack_task
from quorate.engines.ray.transport import (
    ActorConfig,
    SegmentAddress,
    as_array,
    as_tensor,
    make_segment,
    pack_state,
    unpack_state,
)
from quorate.engines.shared.buffers import Buffers
from quorate.engines.shared.shared_memory import Block, BlockLayout
from quorate.engines.shared.update import Arrival, Maker, Prepared, Weights, leave_out_non_finite, weights_of
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.learner import Learner
from quorate.noise import Norms


def cut(sizes: Sequence[int], shards: int) -> list[slice]:
    """Split tensors of these sizes into contiguous parts, so that the largest part is as small as possible.

    There are at most as many parts as tensors, and no part is empty.
    """
    shards = min(shards, len(sizes))
    smallest, largest = max(sizes), sum(sizes)
    while smallest < largest:
        middle = (smallest + largest) // 2
        if _parts_needed(sizes, middle) <= shards:
            largest = middle
        else:
            smallest = middle + 1
    bounds = [0]
    filled = 0
    for index, size in enumerate(sizes):
        must_split = len(sizes) - index == shards - len(bounds)  # as many tensors as parts are left
        if index > bounds[-1] and (filled + size > largest or must_split):
            bounds.append(index)
            filled = 0
        filled += size
    return [slice(start, stop) for start, stop in zip(bounds, [*bounds[1:], len(sizes)], strict=True)]


def _parts_needed(sizes: Sequence[int], most: int) -> int:
    """How many parts there are if each part is filled up to `most` before the next one starts."""
    parts, filled = 1, 0
    for size in sizes:
        if filled + size > most:
            parts, filled = parts + 1, 0
        filled += size
    return parts


#: Threads of the actor in addition to its main thread.
SHARD_GROUPS = {"life": 1, "talk": 1, "take": 1}


class ArrivalBlocks(NamedTuple):
    """An arrival as it is sent to every shard; block numbers are the same in all shards."""

    ticket: Ticket
    read: int  # block of the version it was computed at; -1: not needed
    gradient: int
    some_missing: bool


@dataclass(frozen=True)
class UpdateOrder:
    """An update to make."""

    version: int  # version before the update
    arrivals: tuple[ArrivalBlocks, ...]
    weights: Weights
    target: int  # the block for the next version
    publish: bool  # whether workers on other nodes read the next version


class UpdateResult(NamedTuple):
    """Result of an update."""

    norm: float | None
    norms: Norms | None
    refused: tuple[int, ...] = ()  # indices of arrivals that were left out; if all were, nothing was applied


class Shard:
    """An actor that holds one shard and applies updates to it. The driver decides which gradients make a version.

    One thread makes updates, one receives gradients, one answers pings, and one waits in `live`.
    """

    def __init__(self, payload: dict[str, Any], config: ActorConfig) -> None:
        torch.set_num_threads(config.threads)
        sys.argv[:] = config.argv
        self._payload, self._config = payload, config

    def __repr__(self) -> str:
        return "shard"

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Return at once, to show that the process is responsive."""

    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def live(self) -> None:
        """Never return: Ray fails the call when this shard dies, which notifies the caller."""
        threading.Event().wait()

    def begin(self, part: slice, first: int) -> SegmentAddress | BadInput:
        """Load these tensors, with their first version in block `first`; the address of the shard's memory."""
        try:
            return self._begin(part, first)
        except BadInput as wrong:
            return wrong

    def _begin(self, part: slice, first: int) -> SegmentAddress:
        config = self._config
        task = unpack_task(self._payload)
        with explained(task.name):
            learner = Learner(task, config.learning, config.seed, torch.device("cpu"), part)
        self._has_buffers = not part.start  # the first shard has the buffers
        self._layout = BlockLayout(learner.model, config.wire, part)
        self._segment, address = make_segment(ray.get_runtime_context().get_node_id(), self._layout.nbytes)
        self._blocks: dict[int, Block] = {}
        torch.set_num_threads(1)
        self._maker = Maker(
            learner,
            self._layout,
            self._buffers(learner),
            self._block(first),
            worker_threads=config.threads,
            spare_threads=max(1, min(config.threads, len(os.sched_getaffinity(0)))),
        )
        self._prepared: list[Arrival] = []
        self._last: tuple[int, Any] | None = None  # version before the last update, and the answer
        return address

    def _buffers(self, learner: Learner) -> Buffers:
        return Buffers(learner.model if self._has_buffers else nn.Module())

    def _block(self, number: int) -> Block:
        found = self._blocks.get(number)
        if found is None:
            found = self._blocks[number] = Block(number, self._layout, self._segment.block(number))
        return found

    # ------------------------------------------------------------ gradients and versions

    @ray.method(concurrency_group="take")  # type: ignore[untyped-decorator]
    def take(self, block: int, piece: Any) -> None:
        """Copy a gradient from another node into this block. Doing so twice does no harm.

        It has its own thread, because the call may take long to fail if the gradient's node has died.
        """
        self._segment.block(block).copy_(as_tensor(piece))

    def piece(self, block: int) -> Any:
        """A version as an object, for workers on other nodes."""
        return as_array(self._segment.block(block))

    def averaged(self) -> Any:
        """The moving average of the parameters, as an object."""
        average = self._maker.learner.average
        assert average is not None
        return as_array(average.buffer)

    def _arrivals(self, order: UpdateOrder) -> list[Arrival]:
        found = []
        for ticket, read, gradient, some_missing in order.arrivals:
            version = self._maker.newest if read < 0 else self._block(read)
            found.append(Arrival(ticket, version, self._block(gradient), 0.0, some_missing))
        if self._config.learning.delay_compensation:
            for arrival in found:
                self._maker.compensate(arrival)
        return found

    def _answer(self, order: UpdateOrder, answer: Any) -> Any:
        self._last = order.version, answer
        return (answer, self.piece(order.target)) if order.publish else answer

    # ------------------------------------------------------------ updates of a model in one shard

    def apply(self, order: UpdateOrder) -> Any:
        """Make the next version; an UpdateResult, and the version as an object if `order.publish`.

        Ray may execute a call and still report a failure; a repeated call returns the same answer.
        """
        if self._last is not None and self._last[0] == order.version:
            return self._answer(order, self._last[1])
        maker, target = self._maker, self._block(order.target)
        arrivals = self._arrivals(order)
        outcome = maker.make(arrivals, order.weights, target)
        kept: Sequence[int] = range(len(arrivals))
        if outcome is None:
            finite = maker.finite_ones(arrivals)
            outcome, kept = leave_out_non_finite(arrivals, order.weights, finite, partial(maker.make, target=target))
            if outcome is None:
                maker.skip(target)
        refused = tuple(place for place in range(len(arrivals)) if place not in kept)
        norm, norms = (None, None) if outcome is None else (outcome.norm, outcome.norms)
        return self._answer(order, UpdateResult(norm, norms, refused))

    # ------------------------------------------------------------ updates of a model in several shards

    def prepare(self, order: UpdateOrder) -> Prepared | list[int]:
        """Compute the mean gradient without applying it; if it is not finite, the indices of finite gradients."""
        if order.version == self._maker.learner.version and not self._prepared:
            self._prepared = self._arrivals(order)
        prepared = self._maker.prepare(self._prepared, order.weights)
        return self._maker.finite_ones(self._prepared) if prepared is None else prepared

    def keep(self, order: UpdateOrder, kept: Sequence[int]) -> Prepared | None:
        """As `prepare`, with only the arrivals at these indices; None if their mean is not finite either."""
        return self._maker.prepare([self._prepared[index] for index in kept], weights_of(order.weights, kept))

    def commit(self, order: UpdateOrder, kept: Sequence[int], norm: float | None) -> Any:
        """Apply the prepared mean of the arrivals at these indices; without any, only count the version up."""
        if self._last is not None and self._last[0] == order.version:
            return self._answer(order, None)
        arrivals, self._prepared = self._prepared, []
        target = self._block(order.target)
        if kept:
            self._maker.commit([arrivals[index] for index in kept], target, norm)
        else:
            self._maker.skip(target)
        return self._answer(order, None)

    # ------------------------------------------------------------ checkpoints

    def check_can_save(self) -> BadInput | None:
        """The reason why no checkpoint can hold this shard, if there is one."""
        try:
            check_can_save(self._maker.learner.state())
        except BadInput as wrong:
            return wrong
        return None

    def state(self, version: int, older: Sequence[tuple[int, int]]) -> Any:
        """State of this shard for a checkpoint; `older` are the numbers and blocks of older versions to include."""
        assert self._maker.learner.version == version, "calls came in another order than they were made"
        kept = [
            [version, block.flat.buffer.clone(), [one.clone() for one in block.buffers]]
            for version, block in ((number, self._block(block)) for number, block in older)
        ]
        return pack_state({"learner": self._maker.learner.state(), "older": kept})

    def restore(self, packed: Any, newest: int, older: Sequence[int]) -> BadInput | None:
        """Restore a state, with the newest version and the older ones in these blocks."""
        state = unpack_state(*packed)
        maker = self._maker
        try:
            maker.restore_learner(state["learner"])
        except BadInput as wrong:
            return wrong
        maker.buffers = self._buffers(maker.learner)
        block = self._block(newest)
        if block is not maker.newest:
            block.flat.buffer.copy_(maker.newest.flat.buffer)
        maker.use(block)
        for (_, params, buffers), number in zip(state["older"], older, strict=True):
            self._block(number).flat.buffer.copy_(params)
            self._block(number).set_buffers(buffers)
        self._prepared, self._last = [], None
        return None
