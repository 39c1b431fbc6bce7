"""A shard of the learner: some of the model's tensors, with their optimizer, on some node."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
import torch
from torch import nn

from quorate.checkpoint import check_can_save, check_same_tensors
from quorate.engines._buffers import Buffers
from quorate.engines.processes.blocks import Block
from quorate.engines.processes.making import Arrival, Maker, Prepared, Weights
from quorate.engines.processes.memory import BlockLayout
from quorate.engines.ray.segment import SegmentAddress, make_segment
from quorate.engines.ray.setting import Setting, as_array, as_tensor, pack_state, unpack_state
from quorate.engines.ray.shipping import explained, unship
from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.learner import Learner
from quorate.noise import Norms

#: Threads of the actor beside the one that does its work.
SHARD_GROUPS = {"life": 1, "talk": 1, "take": 1}


class Given(NamedTuple):
    """An arrival, as every shard is told of it: blocks have the same numbers in all of them."""

    ticket: Ticket
    read: int  # block of the version it was computed at; -1: nobody asks
    gradient: int
    some_missing: bool


@dataclass(frozen=True)
class UpdateOrder:
    """An update to make."""

    version: int  # that it starts from
    arrivals: tuple[Given, ...]
    weights: Weights
    target: int  # the block for the next version
    publish: bool  # whether workers on other nodes will read it


class Verdict(NamedTuple):
    """What came of an update in the only shard."""

    norm: float | None
    norms: Norms | None
    refused: tuple[int, ...] = ()  # places of arrivals that were left out; all of them: nothing was applied


class Shard:
    """An actor with one thread for its work, one for gradients that come in, and one for its life.

    It does what it is told; which gradients make a version is decided elsewhere.
    """

    def __init__(self, parcel: dict[str, Any], setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        sys.argv[:] = setting.argv
        self._setting = setting
        self._parcel = parcel

    def __repr__(self) -> str:
        return "shard"

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Answers, if anybody does."""

    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def live(self) -> None:
        """Never answers: who waits for it hears when this shard is gone."""
        threading.Event().wait()

    def begin(self, part: slice, first: int) -> SegmentAddress | BadInput:
        """Take charge of these tensors; their first version is in block `first`. Says where its memory is."""
        try:
            return self._begin(part, first)
        except BadInput as wrong:
            return wrong

    def _begin(self, part: slice, first: int) -> SegmentAddress:
        setting = self._setting
        task = unship(self._parcel)
        with explained(task.name):
            learner = Learner(task, setting.learning, setting.seed, torch.device("cpu"), part)
        self._has_buffers = not part.start
        self._layout = BlockLayout(learner.model, setting.wire, part)
        self._segment, address = make_segment(ray.get_runtime_context().get_node_id(), self._layout.nbytes)
        self._blocks: dict[int, Block] = {}
        torch.set_num_threads(1)
        self._maker = Maker(
            learner,
            self._layout,
            self._buffers(learner),
            self._block(first),
            worker_threads=setting.threads,
            spare_threads=max(1, min(setting.threads, len(os.sched_getaffinity(0)))),
        )
        self._prepared: list[Arrival] = []
        self._last: tuple[int, Any] | None = None  # the version an update started from, and what was said of it
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
        """A gradient from another node comes into this block. To take it twice does no harm.

        Beside everything else, since one whose node has died may take long to fail.
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
        if self._setting.learning.delay_compensation:
            for arrival in found:
                self._maker.compensate(arrival)
        return found

    def _answer(self, order: UpdateOrder, said: Any) -> Any:
        self._last = order.version, said
        return (said, self.piece(order.target)) if order.publish else said

    # ------------------------------------------------------------ the only shard

    def apply(self, order: UpdateOrder) -> Any:
        """Make the next version; a Verdict, and the version as an object if that is wanted.

        Ray may run a call and still report that it failed: the second time, the same is answered.
        """
        if self._last is not None and self._last[0] == order.version:
            return self._answer(order, self._last[1])
        maker, target = self._maker, self._block(order.target)
        arrivals = self._arrivals(order)
        outcome = maker.make(arrivals, order.weights, target)
        refused: tuple[int, ...] = ()
        if outcome is None:
            kept = maker.finite_ones(arrivals)
            refused = tuple(place for place in range(len(arrivals)) if place not in kept)
            if 0 < len(kept) < len(arrivals):
                outcome = maker.make([arrivals[place] for place in kept], weights_of(order.weights, kept), target)
            if outcome is None:
                maker.skip(target)
                refused = tuple(range(len(arrivals)))
        norm, norms = (None, None) if outcome is None else (outcome.norm, outcome.norms)
        return self._answer(order, Verdict(norm, norms, refused))

    # ------------------------------------------------------------ one of several

    def prepare(self, order: UpdateOrder) -> Prepared | list[int]:
        """The mean of these, not applied yet; where it is not finite, the places of those that are."""
        if order.version == self._maker.learner.version and not self._prepared:
            self._prepared = self._arrivals(order)
        prepared = self._maker.prepare(self._prepared, order.weights)
        return self._maker.finite_ones(self._prepared) if prepared is None else prepared

    def keep(self, order: UpdateOrder, kept: Sequence[int]) -> Prepared | None:
        """As `prepare`, but only of those at these places; None if that is not finite either."""
        weights = weights_of(order.weights, kept)
        return self._maker.prepare([self._prepared[place] for place in kept], weights)

    def commit(self, order: UpdateOrder, kept: Sequence[int], norm: float | None) -> Any:
        """Apply what was prepared, of those at these places; of none, only the version moves."""
        if self._last is not None and self._last[0] == order.version:
            return self._answer(order, None)
        arrivals, self._prepared = self._prepared, []
        target = self._block(order.target)
        if kept:
            self._maker.commit([arrivals[place] for place in kept], target, norm)
        else:
            self._maker.skip(target)
        return self._answer(order, None)

    # ------------------------------------------------------------ checkpoints

    def check_can_save(self) -> BadInput | None:
        """What is wrong, if no checkpoint can hold this shard."""
        try:
            check_can_save(self._maker.learner.state())
        except BadInput as wrong:
            return wrong
        return None

    def state(self, version: int, older: Sequence[tuple[int, int]]) -> Any:
        """Everything a resumed run needs of this shard; `older` are versions kept, and their blocks."""
        assert self._maker.learner.version == version, "calls came in another order than they were made"
        kept = [
            [version, block.flat.buffer.clone(), [one.clone() for one in block.buffers]]
            for version, block in ((version, self._block(number)) for version, number in older)
        ]
        return pack_state({"learner": self._maker.learner.state(), "older": kept})

    def restore(self, packed: Any, newest: int, older: Sequence[int]) -> BadInput | None:
        """Continue from a state, with the newest version and the older ones in these blocks."""
        state = unpack_state(*packed)
        maker = self._maker
        try:
            check_same_tensors(maker.learner.model.state_dict(), state["learner"]["model"], "model")
            maker.learner.restore(state["learner"])
        except BadInput as wrong:
            return wrong
        except (KeyError, ValueError, TypeError) as error:
            return BadInput(
                f"the checkpoint is of another optimizer or schedule ({error}); give the task it was made with"
            )
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


def weights_of(weights: Weights, kept: Sequence[int]) -> Weights:
    return None if weights is None else tuple(weights[place] for place in kept)
