"""A worker on some node: computes the gradient of a ticket, and gives up when the next one comes."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from time import perf_counter
from typing import Any, NamedTuple

import ray
import torch
from torch import Tensor

from quorate.engines._batches import Batches
from quorate.engines.processes import messages
from quorate.engines.processes.computing import Cancelled, Computer, Place
from quorate.engines.processes.loading import Loader
from quorate.engines.ray.segment import Segment, attach
from quorate.engines.ray.setting import Cut, Setting, as_array, as_tensor
from quorate.engines.ray.shipping import explained, unship
from quorate.errors import BadInput
from quorate.ledger import Ledger

#: Threads of the actor: two orders, of which the second makes the first give up; and what is said meanwhile.
GROUPS = {"orders": 2, "talk": 2, "life": 1}


class Ready(NamedTuple):
    """A worker is there."""

    node: str
    pid: int
    attached: tuple[bool, ...]  # whose memory it shares, shard by shard


class Worker:
    """An actor. Several threads call it: `compute` for one ticket after the other, and `cancel` beside it."""

    def __init__(self, parcel: dict[str, Any], setting: Setting, number: int) -> None:
        self._parcel, self._setting, self._number = parcel, setting, number
        self._turn = threading.Lock()  # one computes, the next waits until that one has noticed
        self._changed = threading.Condition()
        self._floor = 0  # tickets below it are over
        self._floor_moved = 0.0
        self._mine = threading.local()  # of each thread: memory for what goes to other nodes
        self._ticket = -1
        self._era = 0
        self._segments: list[Segment | None] = []
        self._places: dict[tuple[int, bool], Place] = {}

    def __repr__(self) -> str:
        return f"worker {self._number}"  # what stands before each line it prints

    def begin(self, cut: Cut) -> Ready | bytes:
        """Get ready; what went wrong instead, as a packet."""
        try:
            self._begin(cut)
        except Exception as error:
            return _failure(error, -1, -1)
        ready: Ready = self.attach(cut)
        return ready

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def attach(self, cut: Cut) -> Ready:
        """Find the memory of the shards, which are others when one was lost; versions may then come again."""
        with self._turn:
            self._era += 1
            self._computer.forget_memory()
            for old in self._segments:
                if old is not None:
                    old.close()
            self._segments = [attach(segment, self._node) for segment in cut.segments]
            self._places.clear()
            return Ready(self._node, os.getpid(), tuple(segment is not None for segment in self._segments))

    def _begin(self, cut: Cut) -> None:
        setting = self._setting
        sys.argv[:] = setting.argv
        self._set_threads()
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        device = torch.device(setting.device)
        task = unship(self._parcel)
        with explained(task.name):
            ledger = Ledger(setting.samples, setting.batch_size, None, setting.seed)
            self._loader = Loader(Batches(task, ledger, setting.seed, device))
            self._computer = Computer(
                task,
                seed=setting.seed,
                device=device,
                wire=setting.wire,
                look_through=setting.look_through,
                check=self._check,
                cut=cut.parts,
            )
        sizes = [layout.nbytes for layout in self._computer.layouts]
        if sizes != [segment.block_bytes for segment in cut.segments]:
            raise BadInput(f"task {task.name}: model() gives another model in a worker than in the learner")
        self._node: str = ray.get_runtime_context().get_node_id()

    def _set_threads(self) -> None:
        """Threads inside torch are a setting of the calling thread."""
        if not getattr(self._mine, "is_set", False):
            torch.set_num_threads(self._setting.threads)
            self._mine.is_set = True

    # ------------------------------------------------------------ orders

    @ray.method(concurrency_group="orders")  # type: ignore[untyped-decorator]
    def compute(self, packet: bytes, *pieces: Any) -> Any:
        """A packet that answers the order, and the parts of the gradient that go to shards on other nodes.

        pieces: the version's parts that are in shards on other nodes, in their order.
        """
        order = messages.unpack_order(packet)
        assert order is not None
        self._end_before(order.ticket)
        parts: list[Any] = []
        with self._turn:
            self._set_threads()
            try:
                answer, gradient = self._carry_out(order, pieces)
                if gradient is not None:
                    both = zip(self._segments, gradient.memories, strict=True)
                    parts = [as_array(memory) for segment, memory in both if segment is None]
            except Cancelled:
                answer = messages.pack_abandoned(order.ticket, max(0.0, perf_counter() - self._floor_moved))
            except Exception as error:
                answer = _failure(error, order.ticket, order.batch)
        if not pieces:
            return answer
        return (answer, *parts) if parts else (answer, *(None for _ in pieces))

    def _carry_out(self, order: messages.Work, pieces: tuple[Any, ...]) -> tuple[bytes, Place | None]:
        self._ticket = order.ticket
        self._check()
        if len(pieces) != self._segments.count(None):
            raise Cancelled  # shards have moved since it was ordered
        started = perf_counter()
        batch = self._loader.get(order.batch, self._check)
        loaded = perf_counter()
        self._loader.expect(order.next_batch)
        if order.delay_s > 0:
            self._hold_back(order.delay_s)
        self._check()
        version = self._version(order.version_block, pieces)
        self._computer.look_at(version, (self._era, order.version_block, order.version))
        place = self._gradient(order.gradient_block)
        computed = self._computer.compute(batch, place, self._check)
        if not computed.finite:
            return messages.pack_refused(order.ticket), None
        compute_s = perf_counter() - loaded
        done = messages.Done(order.ticket, computed.loss, loaded - started, compute_s, computed.some_missing)
        return messages.pack_done(done), place

    def _version(self, block: int, pieces: tuple[Any, ...]) -> Place:
        """What to read: blocks of shards on this node, objects of the others."""
        if not pieces:
            return self._shared(block, gradient=False)
        objects = iter(pieces)
        found = [
            segment.block(block) if segment is not None else as_tensor(next(objects)) for segment in self._segments
        ]
        return Place(list(zip(self._computer.layouts, found, strict=True)), gradient=False, lasting=False)

    def _gradient(self, block: int) -> Place:
        """Where to write. What goes to other nodes is written into memory of this thread, which then sends it."""
        if None not in self._segments:
            return self._shared(block, gradient=True)
        own: list[Tensor] | None = getattr(self._mine, "memory", None)
        if own is None:
            sizes = [layout.nbytes for layout in self._computer.layouts]
            own = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            self._mine.memory = own
        found = [
            memory if segment is None else segment.block(block)
            for segment, memory in zip(self._segments, own, strict=True)
        ]
        return Place(list(zip(self._computer.layouts, found, strict=True)), gradient=True)

    def _shared(self, block: int, gradient: bool) -> Place:
        found = self._places.get((block, gradient))
        if found is None:
            memories = [segment.block(block) for segment in self._segments if segment is not None]
            pieces = list(zip(self._computer.layouts, memories, strict=True))
            found = self._places[block, gradient] = Place(pieces, gradient=gradient)
        return found

    # ------------------------------------------------------------ what is said meanwhile

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def cancel(self, ticket: int) -> None:
        """This ticket is over, and there is no next one."""
        self._end_before(ticket + 1)

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Answers at once, if anybody does."""

    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def live(self) -> None:
        """Never answers: who waits for it hears when this worker is gone."""
        threading.Event().wait()

    def _end_before(self, ticket: int) -> None:
        """All tickets before this one are over. Calls may overtake each other, so it never goes back."""
        with self._changed:
            if ticket > self._floor:
                self._floor, self._floor_moved = ticket, perf_counter()
                self._changed.notify_all()

    def _check(self) -> None:
        if self._ticket < self._floor:
            raise Cancelled

    def _hold_back(self, seconds: float) -> None:
        """Sleep, but wake when this ticket is over."""
        until = perf_counter() + seconds
        with self._changed:
            while (left := until - perf_counter()) > 0:
                self._check()
                self._changed.wait(left)


def _failure(error: Exception, ticket: int, batch: int) -> bytes:
    bad_input = isinstance(error, BadInput)
    text = str(error) if bad_input else "".join(traceback.format_exception(error))
    return messages.pack_failed(ticket, batch, bad_input, text)
