"""The driver's side of the workers: it sends orders, receives answers, and replaces lost workers by new actors.

Every event is a reference that `ray.wait` waits for: an answer, a worker that gets ready, the death of an idle worker,
or the delivery of a gradient to a shard on another node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from quorate.engines.ray.actors import end
from quorate.engines.ray.cluster import Cluster
from quorate.engines.ray.session import first_line
from quorate.engines.ray.transport import Cut
from quorate.engines.ray.versions import GradientBlock, RayVersions, RoomForBlocks
from quorate.engines.ray.worker import Ready
from quorate.engines.shared import messages
from quorate.engines.shared.order_book import Loss, Order, OrderBook
from quorate.engines.shared.real_time import Happening
from quorate.engines.shared.worker_health import AnswerTimes, Failures, back_off_s
from quorate.errors import BadInput, LearnerLost, QuorateError
from quorate.events import Ticket

_CHECK_EVERY_S = 0.25
_DRAIN_EVERY_S = 1.0
#: Timeout of a ping. A busy machine may starve a process for seconds.
PING_S = 10.0
#: Timeout for workers to attach to a replaced shard. A worker that is computing abandons its ticket first.
MOVE_S = 5.0
#: Workers of a leaving node finish their tickets, unless the node has less time left than this.
LAST_MOMENT_S = 2.0


@dataclass
class ActorRecord(OrderBook):
    """One worker number, with its current actor. A lost actor is replaced by a new one."""

    actor: Any = None
    ready: Ready | None = None
    in_delivery: list[Order] = field(default_factory=list)  # answered; parts of the gradient are on the way to shards
    life: Any = None  # a reference that becomes ready when the actor dies
    ping: Any = None
    ping_since: float = 0.0
    leaves: bool = False  # its node has announced its end
    cut: Any = None  # the shards that this actor knows
    nodes_at_start: set[str] = field(default_factory=set)  # live nodes when this actor was made

    def remote_shards(self) -> list[int]:
        """Shards whose memory the worker does not share."""
        assert self.ready is not None
        return [shard for shard, attached in enumerate(self.ready.attached) if not attached]


class Pending(NamedTuple):
    """The meaning of a reference."""

    kind: str  # "ready", "answer" or "delivered"
    record: ActorRecord
    order: Order | None = None


class RayWorkers:
    """Talks to worker actors. Everything happens inside `wait`; there is no other thread.

    cut: the current shards.
    make: creates the actor of a worker, and returns it with the reference that becomes ready when the worker is.
    check_node: called with the node of a lost worker.
    """

    def __init__(
        self,
        workers: int,
        updater: RayVersions,
        room: RoomForBlocks,
        cluster: Cluster,
        cut: Cut,
        make: Callable[[int], tuple[Any, Any]],
        check_node: Callable[[str], None],
        patience_s: float,
    ) -> None:
        self._updater, self._room, self._cluster, self._cut = updater, room, cluster, cut
        self._make, self._check_node = make, check_node
        self.records = [ActorRecord(number) for number in range(workers)]
        self._pending: dict[Any, Pending] = {}
        self._cancellations: dict[int, int] = {}  # worker -> serial of its cancelled order; a new order supersedes it
        self._restarts: list[tuple[float, int]] = []
        self._failures = Failures()
        self._times = AnswerTimes(patience_s)
        self._check_at = self._drain_at = 0.0
        self._happened: list[Happening] = []  # not returned by `wait` yet
        self._lingering: dict[Any, list[GradientBlock]] = {}  # life of a killed actor -> blocks it may still write to
        self._serial = 0  # of the last order; ticket numbers repeat after a rollback

    # ------------------------------------------------------------ orders

    def start(self, worker: int) -> None:
        """Make a new actor for a worker. If the cluster has no room, the actor gets ready when there is some."""
        record = self.records[worker]
        record.actor, ready = self._make(worker)
        record.restart()
        record.ready = record.ping = record.life = None
        record.leaves = False
        record.nodes_at_start = self._live_nodes()
        record.cut = self._cut
        self._pending[ready] = Pending("ready", record)

    def _live_nodes(self) -> set[str]:
        return {node.id for node in self._cluster.nodes()}

    def send(self, ticket: Ticket, version: Any, gradient: Any, next_batch: int, delay_s: float) -> None:
        record = self.records[ticket.worker]
        self._cancellations.pop(record.number, None)  # a new order cancels the old one
        self._serial += 1
        numbers = self._serial, ticket.version, ticket.batch, version.block, gradient.block
        packet = messages.pack_start(messages.TicketOrder(*numbers, next_batch, delay_s))
        order = Order(ticket, version, gradient, delay_s, packet, serial=self._serial)
        if record.add(order):
            self._post(record, order)

    def _post(self, record: ActorRecord, order: Order) -> None:
        """Call the actor with an order of its order book."""
        remote = record.remote_shards()
        if not remote:
            answer = record.actor.compute.remote(order.packet)
        else:
            pieces = [self._updater.piece(order.version, shard) for shard in remote]
            compute = record.actor.compute.options(num_returns=1 + len(remote))
            answer, *order.gradient.objects = compute.remote(order.packet, *pieces)
        self._pending[answer] = Pending("answer", record, order)

    def cancel(self, ticket: Ticket) -> Order | None:
        """Cancel a worker's ticket; returns the order if it was never sent."""
        record = self.records[ticket.worker]
        never_sent = record.take_back(ticket)
        if never_sent is not None:
            return never_sent
        for order in (*record.orders, *record.in_delivery):
            if order.ticket is ticket:
                order.cancelled = True
                order.gradient.objects = []  # Ray frees the objects as soon as the worker has made them
                self._cancellations[record.number] = order.serial
        return None

    # ------------------------------------------------------------ events

    def wait(self, timeout_s: float | None) -> list[Happening]:
        """Wait for an event for at most this long; returns everything that has happened since the last call."""
        self._send_cancellations()
        now = monotonic()
        until = min(self._check_at, self._restarts[0][0]) if self._restarts else self._check_at
        if timeout_s is not None:
            until = min(until, now + timeout_s)
        idle = [record.life for record in self.records if record.life is not None and not record.orders]
        references = [*self._updater.shard_lives, *self._pending, *idle, *self._lingering]
        ready, _ = ray.wait(references, num_returns=1, timeout=max(0.0, until - now), fetch_local=False)
        for reference in ready:
            self._handle(reference)
        now = monotonic()
        while self._restarts and self._restarts[0][0] <= now:
            self.start(heapq.heappop(self._restarts)[1])
        if now >= self._check_at:
            self._check_at = now + _CHECK_EVERY_S
            self._check_health(now)
        return self.take_happened()

    def take_happened(self) -> list[Happening]:
        """The events that were not returned before."""
        happened, self._happened = self._happened, []
        return happened

    def _send_cancellations(self) -> None:
        for worker, serial in self._cancellations.items():
            self.records[worker].actor.cancel.remote(serial)
        self._cancellations.clear()

    def _handle(self, reference: Any) -> None:
        pending = self._pending.pop(reference, None)
        if pending is None:
            self._handle_death(reference)
            return
        kind, record, order = pending
        try:
            value = ray.get(reference)
        except RayError as error:
            self._call_failed(kind, record, order, error)
            return
        if kind == "ready":
            self._got_ready(record, value)
            return
        assert order is not None
        if kind == "answer":
            self._answered(record, order, messages.unpack_answer(value))
        else:
            self._delivered(record, order)

    def _handle_death(self, life: Any) -> None:
        if life in self._updater.shard_lives:
            raise LearnerLost("a shard of the learner is gone")
        if life in self._lingering:
            for gradient in self._lingering.pop(life):
                self._room.release(gradient)
            return
        record = next(record for record in self.records if record.life is life)
        why = "ended"
        try:
            ray.get(life, timeout=1)
        except (RayError, QuorateError) as error:
            why = first_line(error)
        self._lost(record, why)

    def _got_ready(self, record: ActorRecord, value: Ready | bytes) -> None:
        if isinstance(value, bytes):
            failed = messages.unpack_answer(value)
            assert isinstance(failed, messages.FailedAnswer)
            self._failed(record, failed)
            return
        if record.cut is not self._cut:  # a shard was replaced meanwhile: the worker must not use the old memory
            record.cut = self._cut
            self._pending[record.actor.attach.remote(self._cut)] = Pending("ready", record)
            return
        record.ready = value
        record.life = record.actor.live.remote()
        self._find_remote_workers()
        self._happened.append(record.number)

    def _find_remote_workers(self) -> None:
        """Update for each shard whether a worker needs its part of the versions as an object."""
        for shard in range(len(self._updater.shards)):
            self._updater.has_remote_workers[shard] = any(
                record.ready is not None and not record.ready.attached[shard] for record in self.records
            )

    def _answered(self, record: ActorRecord, order: Order, answer: messages.Answer) -> None:
        record.orders.remove(order)
        if isinstance(answer, messages.FailedAnswer):
            self._failed(record, answer, [order])
            return
        record.ping = None
        held = record.answered(answer)
        if held is not None:
            self._post(record, held)
        if isinstance(answer, messages.DoneAnswer):
            self._times.add(answer.data_s + answer.compute_s)
            if order.gradient.objects and not order.cancelled:
                self._deliver(record, order, answer)
                return
        order.gradient.objects = []
        self._happened.append((order, answer))
        self._leave(record)

    # ------------------------------------------------------------ gradients from other nodes

    def _deliver(self, record: ActorRecord, order: Order, answer: messages.DoneAnswer) -> None:
        """Let shards on other nodes copy their parts. The gradient counts as arrived after that: it is then safe."""
        copies = [
            self._updater.shards[shard].take.remote(order.gradient.block, part)
            for shard, part in zip(record.remote_shards(), order.gradient.objects, strict=True)
        ]
        order.gradient.objects = []  # the calls keep the objects alive
        record.in_delivery.append(order)
        order.answer, order.parts_left = answer, len(copies)
        for reference in copies:
            self._pending[reference] = Pending("delivered", record, order)

    def _delivered(self, record: ActorRecord, order: Order, failed: bool = False) -> None:
        """One part of a gradient is at its shard, or is lost."""
        order.parts_left -= 1
        order.is_lost = order.is_lost or failed
        if order.parts_left:
            return
        if order in record.in_delivery:
            record.in_delivery.remove(order)
        if order.is_lost and not order.cancelled:  # the worker's node died before the part was copied
            self._lost(record, "a part of its gradient was lost", [order])
            return
        self._happened.append((order, order.answer))
        self._leave(record)

    # ------------------------------------------------------------ losses

    def _call_failed(self, kind: str, record: ActorRecord, order: Order | None, error: RayError) -> None:
        actor_is_gone = isinstance(error, RayActorError) and not isinstance(error, RayTaskError)
        if kind == "delivered":
            if actor_is_gone:
                raise LearnerLost("a shard of the learner is gone") from error
            assert order is not None
            self._delivered(record, order, failed=True)
        elif not actor_is_gone:
            # An object that the call needs is lost, or its code cannot be loaded on the node.
            if order is not None and order in record.orders:
                record.orders.remove(order)
            self._lost(record, first_line(error), [] if order is None else [order])
        elif order is None or order in record.orders:  # otherwise the call belongs to an earlier actor
            self._lost(record, first_line(error), surely=isinstance(error, ActorDiedError))

    def _failed(self, record: ActorRecord, answer: messages.FailedAnswer, orders: list[Order] | None = None) -> None:
        """A worker has reported an exception."""
        record.error = answer
        if answer.bad_input:
            raise BadInput(answer.text)
        self._lost(record, answer.text, orders)

    def _lost(self, record: ActorRecord, why: str, more: list[Order] | None = None, surely: bool = False) -> None:
        """Replace a worker that is dead or useless.

        more: orders that are lost with it, in addition to its unanswered ones.
        surely: the process is dead, so it cannot write to shared memory any more.
        """
        loss = Loss(record.number, [*(more or []), *record.unfinished()], record.ready is not None)
        self._end_life(record, surely)
        if record.error is not None or record.nodes_at_start <= self._live_nodes():  # otherwise its node may have died
            record.failures += 1
            record.report(self._failures, loss, why, lambda: f"ended: {why}", expected=True)
        heapq.heappush(self._restarts, (monotonic() + back_off_s(record.failures), record.number))
        self._happened.append(loss)

    def _end_life(self, record: ActorRecord, surely: bool) -> None:
        if record.ready is not None:
            self._check_node(record.ready.node)
        if not surely and record.life is not None:
            # The process may still write to these blocks: they are free when Ray reports its death.
            self._lingering[record.life] = [order.gradient for order in record.orders]
            for order in record.orders:
                order.gradient = GradientBlock(-1)
        end(record.actor)
        for reference, pending in list(self._pending.items()):
            if pending.record is record and pending.kind != "delivered":
                del self._pending[reference]
        for order in record.in_delivery:  # the delivery goes on, but the gradient is not used
            order.cancelled = True
        self._cancellations.pop(record.number, None)
        record.clear()
        record.actor = record.ready = record.life = record.ping = None
        record.in_delivery = []
        self._find_remote_workers()

    def _check_health(self, now: float) -> None:
        """Replace workers that have not answered for too long, and workers on nodes that are about to leave."""
        self._cluster.check_raylet()
        if now >= self._drain_at:
            self._drain_at = now + _DRAIN_EVERY_S
            leaving = self._cluster.draining()
            for record in self.records:
                if record.ready is not None and record.ready.node in leaving:
                    record.leaves = True
                    self._leave(record, at_once=leaving[record.ready.node] < LAST_MOMENT_S)
        for record in self.records:
            if record.ready is None or not record.orders:
                continue
            late_s = now - record.waiting_since
            limits = self._times.limits(record.has_answered)
            if late_s > limits.hanging:
                record.hangs = True
                self._lost(record, f"it had not answered for {late_s:.0f} s")
            elif late_s > max(1.0, limits.stopped):
                self._ping(record, now)

    def _ping(self, record: ActorRecord, now: float) -> None:
        """Ping a worker that is late: a stopped process does not answer."""
        if record.ping is None:
            record.ping, record.ping_since = record.actor.ping.remote(), now
        elif ray.wait([record.ping], timeout=0)[0]:
            record.ping = record.actor.ping.remote() if now - record.ping_since > 1.0 else record.ping
            record.ping_since = now
        elif now - record.ping_since > PING_S:
            silent_s = now - record.ping_since
            self._lost(record, f"it was killed, since it had not even answered a ping for {silent_s:.0f} s")

    def _leave(self, record: ActorRecord, at_once: bool = False) -> None:
        """Move a worker away from a leaving node, after its unfinished orders unless `at_once`."""
        if record.ready is None or not record.leaves or ((record.orders or record.in_delivery) and not at_once):
            return
        orders = record.unfinished()
        self._end_life(record, surely=False)
        heapq.heappush(self._restarts, (monotonic(), record.number))
        self._happened.append(Loss(record.number, orders, True))

    # ------------------------------------------------------------ for the run

    def lose(self, worker: int) -> None:
        """Kill a worker, for a fault script."""
        end(self.records[worker].actor)

    def forget_orders(self) -> list[Order]:
        """Cancel all orders for a rollback; returns the orders for which no answer will come."""
        over = []
        for record in self.records:
            for order in (*record.orders, *record.in_delivery):
                order.cancelled = order.forgotten = True
                order.gradient.objects = []
            for order in record.in_delivery:
                order.gradient = GradientBlock(-1)  # a shard may still write to the block, so it is never used again
                over.append(order)
            record.in_delivery = []
            if record.held is not None:
                over.append(record.held)
                record.held = None
            if record.orders:
                self._cancellations[record.number] = record.orders[-1].serial
        for reference, pending in list(self._pending.items()):
            if pending.kind == "delivered":  # the shard may be gone
                del self._pending[reference]
        over += [one[0] for one in self._happened if isinstance(one, tuple)]
        self._happened = [one for one in self._happened if not isinstance(one, tuple)]
        return over

    def move_to(self, cut: Cut) -> None:
        """Attach the ready workers to new shards; other workers learn of the shards when they start."""
        self._cut = cut
        self._send_cancellations()
        ready = [(record, record.ready.node) for record in self.records if record.ready is not None]
        alive = {node: self._cluster.answers(node) for node in {node for _, node in ready}}
        attached = []
        for record, node in ready:
            if alive[node]:
                attached.append((record, record.actor.attach.remote(cut)))
                record.cut = cut
            else:
                self._lost(record, "its node is gone")
        if attached:
            ray.wait([reference for _, reference in attached], num_returns=len(attached), timeout=MOVE_S)
        for record, reference in attached:
            try:
                record.ready = ray.get(reference, timeout=0)
            except RayError as error:
                self._lost(record, f"it was killed, since it did not follow the learner ({first_line(error)})")
        self._find_remote_workers()

    def close(self) -> None:
        for record in self.records:
            end(record.actor)
            record.actor = None
        self._pending.clear()
