"""The worker actor: computes the gradient of a ticket, and abandons it when the next ticket comes."""

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

from quorate.engines.ray.task_transfer import explained, unpack_task
from quorate.engines.ray.transport import ActorConfig, Cut, Segment, as_array, read_blocks
from quorate.engines.shared import messages
from quorate.engines.shared.batches import Batches, Loader
from quorate.engines.shared.compute import Cancelled, Computer, TensorPlace
from quorate.errors import BadInput
from quorate.ledger import Ledger

#: Threads of the actor: two for orders, since a second order cancels the first; the others take calls meanwhile.
GROUPS = {"orders": 2, "talk": 2, "life": 1}


class Ready(NamedTuple):
    """Sent by a worker that is ready to compute."""

    node: str
    pid: int
    attached: tuple[bool, ...]  # for each shard: whether the worker shares its memory


class WorkerActor:
    """An actor with several threads: one `compute` runs at a time, and `cancel` may run at the same time."""

    def __init__(self, payload: dict[str, Any], config: ActorConfig, number: int) -> None:
        self._payload, self._config, self._number = payload, config, number
        self._computing = threading.Lock()  # a new order waits until the cancelled one has stopped
        self._changed = threading.Condition()
        self._floor = 0  # tickets below it are cancelled
        self._floor_moved = 0.0
        self._thread = threading.local()  # memory of each thread for gradients that go to other nodes
        self._ticket = -1
        self._attachments = 0  # how often the shards' memory was opened: version numbers repeat after a rollback
        self._segments: list[Segment | None] = []
        self._places: dict[tuple[int, bool], TensorPlace] = {}

    def __repr__(self) -> str:
        return f"worker {self._number}"  # Ray's prefix of the lines that this actor prints

    def begin(self, cut: Cut) -> Ready | bytes:
        """Load the task and attach to the shards; a packet with the error if that fails."""
        try:
            self._begin(cut)
        except Exception as error:
            return _failure(error, -1, -1)
        ready: Ready = self.attach(cut)
        return ready

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def attach(self, cut: Cut) -> Ready:
        """Open the shards' memory, again after a shard was replaced."""
        with self._computing:
            self._attachments += 1
            self._computer.forget_memory()
            self._segments = cut.attach(self._segments, self._node)
            self._places.clear()
            return Ready(self._node, os.getpid(), tuple(segment is not None for segment in self._segments))

    def _begin(self, cut: Cut) -> None:
        config = self._config
        sys.argv[:] = config.argv
        self._set_threads()
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        device = torch.device(config.device)
        task = unpack_task(self._payload)
        with explained(task.name):
            ledger = Ledger(config.samples, config.batch_size, None, config.seed)
            self._loader = Loader(Batches(task, ledger, config.seed, device))
            self._computer = Computer(
                task,
                seed=config.seed,
                device=device,
                wire=config.wire,
                look_through=config.look_through,
                check=self._check,
                cut=cut.parts,
            )
        sizes = [layout.nbytes for layout in self._computer.layouts]
        if sizes != [segment.block_bytes for segment in cut.segments]:
            raise BadInput(f"task {task.name}: model() gives another model in a worker than in the learner")
        self._node: str = ray.get_runtime_context().get_node_id()

    def _set_threads(self) -> None:
        """Set torch's number of threads, which is a setting of each calling thread."""
        if not getattr(self._thread, "is_set", False):
            torch.set_num_threads(self._config.threads)
            self._thread.is_set = True

    # ------------------------------------------------------------ orders

    @ray.method(concurrency_group="orders")  # type: ignore[untyped-decorator]
    def compute(self, packet: bytes, *pieces: Any) -> Any:
        """Carry out an order; the answer as a packet, and the gradient's parts for shards on other nodes.

        pieces: the version's parts in shards on other nodes, in shard order.
        """
        order = messages.unpack_order(packet)
        assert order is not None
        self._end_before(order.ticket)
        parts: list[Any] = []
        with self._computing:
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

    def _carry_out(self, order: messages.TicketOrder, pieces: tuple[Any, ...]) -> tuple[bytes, TensorPlace | None]:
        self._ticket = order.ticket
        self._check()
        if len(pieces) != self._segments.count(None):
            raise Cancelled  # shards have moved since the order was sent
        started = perf_counter()
        batch = self._loader.get(order.batch, self._check)
        loaded = perf_counter()
        self._loader.expect(order.next_batch)
        if order.delay_s > 0:
            self._sleep(order.delay_s)
        self._check()
        version = self._version(order.version_block, pieces)
        self._computer.look_at(version, (self._attachments, order.version_block, order.version))
        place = self._gradient(order.gradient_block)
        computed = self._computer.compute(batch, place, self._check)
        if not computed.finite:
            return messages.pack_refused(order.ticket), None
        compute_s = perf_counter() - loaded
        done = messages.DoneAnswer(order.ticket, computed.loss, loaded - started, compute_s, computed.some_missing)
        return messages.pack_done(done), place

    def _version(self, block: int, pieces: tuple[Any, ...]) -> TensorPlace:
        """The version to read: shared memory of shards on this node, objects of the other shards."""
        if not pieces:
            return self._shared(block, gradient=False)
        memories = read_blocks(self._segments, block, pieces)
        return TensorPlace(list(zip(self._computer.layouts, memories, strict=True)), gradient=False, lasting=False)

    def _gradient(self, block: int) -> TensorPlace:
        """Where to write the gradient. Parts for other nodes go into memory of this thread, which then sends them."""
        if None not in self._segments:
            return self._shared(block, gradient=True)
        layouts = self._computer.layouts
        own: list[Tensor] | None = getattr(self._thread, "memory", None)
        if own is None:
            own = self._thread.memory = [torch.zeros(layout.nbytes, dtype=torch.uint8) for layout in layouts]
        memories = [
            memory if segment is None else segment.block(block)
            for segment, memory in zip(self._segments, own, strict=True)
        ]
        return TensorPlace(list(zip(layouts, memories, strict=True)), gradient=True)

    def _shared(self, block: int, gradient: bool) -> TensorPlace:
        found = self._places.get((block, gradient))
        if found is None:
            memories = [segment.block(block) for segment in self._segments if segment is not None]
            pieces = list(zip(self._computer.layouts, memories, strict=True))
            found = self._places[block, gradient] = TensorPlace(pieces, gradient=gradient)
        return found

    # ------------------------------------------------------------ calls during a computation

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def cancel(self, ticket: int) -> None:
        """Cancel this ticket without a next one."""
        self._end_before(ticket + 1)

    @ray.method(concurrency_group="talk")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Return at once, to show that the process is responsive."""

    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def live(self) -> None:
        """Never return: Ray fails the call when this worker dies, which notifies the caller."""
        threading.Event().wait()

    def _end_before(self, ticket: int) -> None:
        """Cancel all tickets before this one. Calls may overtake each other, so the floor only rises."""
        with self._changed:
            if ticket > self._floor:
                self._floor, self._floor_moved = ticket, perf_counter()
                self._changed.notify_all()

    def _check(self) -> None:
        if self._ticket < self._floor:
            raise Cancelled

    def _sleep(self, seconds: float) -> None:
        """Sleep, but stop when this ticket is cancelled."""
        until = perf_counter() + seconds
        with self._changed:
            while (left := until - perf_counter()) > 0:
                self._check()
                self._changed.wait(left)


def _failure(error: Exception, ticket: int, batch: int) -> bytes:
    bad_input = isinstance(error, BadInput)
    text = str(error) if bad_input else "".join(traceback.format_exception(error))
    return messages.pack_failed(ticket, batch, bad_input, text)
