"""The workers of a run, seen from the driver: orders out, answers in, and new actors for those that are lost.

Everything is a reference that `ray.wait` waits for: an answer, a worker that gets ready, the end of an idle one, a
gradient that is on its way to a shard on another node.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable
from time import monotonic
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from quorate.engines.processes import messages
from quorate.engines.processes.failures import Failures, back_off_s
from quorate.engines.processes.live import Happening, Loss, Order
from quorate.engines.processes.silence import AnswerTimes
from quorate.engines.ray.calling import first_line
from quorate.engines.ray.seats import Pending, Seat
from quorate.engines.ray.setting import Cut
from quorate.engines.ray.updating import Gradient, Updater
from quorate.engines.ray.worker import Ready
from quorate.errors import BadInput, LearnerLost, QuorateError
from quorate.events import Ticket

_LOOK_EVERY_S = 0.25
_DRAIN_EVERY_S = 1.0
_UNANSWERED = 2  # orders a worker is sent; the second, so that it can go on at once when the first is over
#: How long a worker may not even answer a ping. A busy machine may starve a process for seconds.
PING_S = 10.0
#: How long workers are waited for when the learner has moved. One that is computing gives up before it follows.
MOVE_S = 5.0
#: Before the announced end of a node comes so near, its workers finish what they do.
LAST_MOMENT_S = 2.0


class Crew:
    """Talks to worker actors. Everything is driven by `wait`; nothing here runs in another thread.

    make: a new actor for a worker and the reference that is ready when it is.
    draining: the nodes that have announced their end, and the seconds they have left.
    nodes: those that are alive.
    left: told of the node on which a worker was lost.
    """

    def __init__(
        self,
        workers: int,
        updater: Updater,
        make: Callable[[int], tuple[Any, Any]],
        draining: Callable[[], dict[str, float]],
        nodes: Callable[[], set[str]],
        left: Callable[[str], None],
    ) -> None:
        self._updater, self._make, self._draining, self._nodes = updater, make, draining, nodes
        self._left = left
        self.seats = [Seat(number) for number in range(workers)]
        self._pending: dict[Any, Pending] = {}
        self._to_tell: dict[int, int] = {}  # worker -> its cancelled order, where no other has told it yet
        self._restarts: list[tuple[float, int]] = []
        self._failures = Failures()
        self._times = AnswerTimes()
        self._look_at = self._drain_at = 0.0
        self._happened: list[Happening] = []  # noticed while something else was done
        self.cut: Cut | None = None  # how the model is cut now, and where its shards are
        self.give_back: Callable[[Gradient], None] = lambda gradient: None
        self._lingering: dict[Any, list[Gradient]] = {}  # life of a worker given up -> what it may still write to
        self._serial = 0  # of the last order; ticket numbers come again when the run steps back

    # ------------------------------------------------------------ orders

    def start(self, worker: int) -> None:
        """A new actor for a worker. Where the cluster has no room, it gets ready when there is some."""
        seat = self.seats[worker]
        seat.actor, ready = self._make(worker)
        seat.ready = seat.told = seat.ping = seat.life = None
        seat.has_answered = seat.leaves = False
        seat.nodes_at_start = self._nodes()
        seat.cut = self.cut
        self._pending[ready] = Pending("ready", seat)

    def send(self, ticket: Ticket, version: Any, gradient: Any, next_batch: int, delay_s: float) -> None:
        seat = self.seats[ticket.worker]
        self._to_tell.pop(seat.number, None)  # the worker gives up the old one when it sees the new one
        self._serial += 1
        numbers = self._serial, ticket.version, ticket.batch, version.block, gradient.block
        packet = messages.pack_start(messages.Work(*numbers, next_batch, delay_s))
        order = Order(ticket, version, gradient, delay_s, packet, serial=self._serial)
        if len(seat.orders) < _UNANSWERED:
            self._post(seat, order)
        else:
            seat.held = order

    def _post(self, seat: Seat, order: Order) -> None:
        assert seat.ready is not None
        if not seat.orders:
            seat.waiting_since, seat.ping = monotonic() + order.delay_s, None
        seat.orders.append(order)
        elsewhere = [shard for shard, attached in enumerate(seat.ready.attached) if not attached]
        if not elsewhere:
            answer = seat.actor.compute.remote(order.packet)
        else:
            pieces = [self._updater.piece(order.version, shard) for shard in elsewhere]
            compute = seat.actor.compute.options(num_returns=1 + len(elsewhere))
            answer, *order.gradient.objects = compute.remote(order.packet, *pieces)
        self._pending[answer] = Pending("answer", seat, order)

    def cancel(self, ticket: Ticket) -> Order | None:
        """Let a worker know that its ticket is over; gives the order back if the worker never got it."""
        seat = self.seats[ticket.worker]
        if seat.held is not None and seat.held.ticket is ticket:
            order, seat.held = seat.held, None
            return order
        for order in (*seat.orders, *seat.on_their_way):
            if order.ticket is ticket:
                order.cancelled = True
                order.gradient.objects = []  # freed as soon as the worker has made them
                self._to_tell[seat.number] = order.serial
        return None

    # ------------------------------------------------------------ what happens

    def wait(self, timeout_s: float | None) -> list[Happening]:
        """What has happened, after waiting for something for at most so long."""
        self._tell_cancelled()
        now = monotonic()
        until = min(self._look_at, self._restarts[0][0]) if self._restarts else self._look_at
        if timeout_s is not None:
            until = min(until, now + timeout_s)
        idle = [seat.life for seat in self.seats if seat.life is not None and not seat.orders]
        references = [*self._updater.shard_lives, *self._pending, *idle, *self._lingering]
        ready, _ = ray.wait(references, num_returns=1, timeout=max(0.0, until - now), fetch_local=False)
        for reference in ready:
            self._hear(reference)
        now = monotonic()
        while self._restarts and self._restarts[0][0] <= now:
            self.start(heapq.heappop(self._restarts)[1])
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._look_for_lost(now)
        happened, self._happened = self._happened, []
        return happened

    def _tell_cancelled(self) -> None:
        for worker, serial in self._to_tell.items():
            self.seats[worker].actor.cancel.remote(serial)
        self._to_tell.clear()

    def _hear(self, reference: Any) -> None:
        pending = self._pending.pop(reference, None)
        if pending is None:  # it was a life
            if reference in self._updater.shard_lives:
                raise LearnerLost("a shard of the learner is gone")
            if reference in self._lingering:
                for gradient in self._lingering.pop(reference):
                    self.give_back(gradient)
                return
            seat = next(seat for seat in self.seats if seat.life is reference)
            self._lost(seat, _why_gone(reference))
            return
        kind, seat, order = pending
        try:
            said = ray.get(reference)
        except RayTaskError as error:
            self._failed_call(kind, seat, order, error)
        except RayActorError as error:
            self._gone(kind, seat, order, error)
        except RayError as error:
            self._failed_call(kind, seat, order, error)
        else:
            if kind == "ready":
                self._ready(seat, said)
            elif kind == "answer":
                assert order is not None
                self._answered(seat, order, messages.unpack_answer(said))
            else:
                assert order is not None
                self._taken(seat, order)

    def _ready(self, seat: Seat, said: Ready | bytes) -> None:
        if isinstance(said, bytes):
            told = messages.unpack_answer(said)
            assert isinstance(told, messages.Failed)
            if told.bad_input:
                raise BadInput(told.text)
            seat.told = told
            self._lost(seat, told.text)
            return
        if seat.cut is not self.cut:  # a shard has moved while it began: it must not look at the old one's memory
            seat.cut = self.cut
            self._pending[seat.actor.attach.remote(self.cut)] = Pending("ready", seat)
            return
        seat.ready = said
        seat.life = seat.actor.live.remote()
        self._look_who_is_elsewhere()
        self._happened.append(seat.number)

    def _look_who_is_elsewhere(self) -> None:
        """Whether versions are wanted as objects, shard by shard."""
        for shard in range(len(self._updater.shards)):
            self._updater.somebody_is_elsewhere[shard] = any(
                seat.ready is not None and not seat.ready.attached[shard] for seat in self.seats
            )

    def _answered(self, seat: Seat, order: Order, answer: messages.Answer) -> None:
        seat.orders.remove(order)
        if isinstance(answer, messages.Failed):
            seat.told = answer
            if answer.bad_input:
                raise BadInput(answer.text)
            self._lost(seat, answer.text, [order])
            return
        if not isinstance(answer, messages.Abandoned):
            seat.failures, seat.has_answered = 0, True
        seat.waiting_since, seat.ping = monotonic(), None
        if seat.orders:
            seat.waiting_since += seat.orders[0].delay_s
        if seat.held is not None:
            held, seat.held = seat.held, None
            self._post(seat, held)
        if isinstance(answer, messages.Done):
            self._times.add(answer.data_s + answer.compute_s)
            if order.gradient.objects and not order.cancelled:
                self._bring(seat, order, answer)
                return
        order.gradient.objects = []
        self._happened.append((order, answer))
        self._leave(seat)

    # ------------------------------------------------------------ gradients from other nodes

    def _bring(self, seat: Seat, order: Order, answer: messages.Done) -> None:
        """Let shards on other nodes take their parts; only then has the gradient arrived, and can be lost no more."""
        assert seat.ready is not None
        elsewhere = [shard for shard, attached in enumerate(seat.ready.attached) if not attached]
        taken = [
            self._updater.shards[shard].take.remote(order.gradient.block, part)
            for shard, part in zip(elsewhere, order.gradient.objects, strict=True)
        ]
        order.gradient.objects = []  # shards hold them until they are taken
        seat.on_their_way.append(order)
        order.answer, order.parts_left = answer, len(taken)
        for reference in taken:
            self._pending[reference] = Pending("taken", seat, order)

    def _taken(self, seat: Seat, order: Order, well: bool = True) -> None:
        order.parts_left -= 1
        order.is_lost = order.is_lost or not well
        if order.parts_left:
            return
        if order in seat.on_their_way:
            seat.on_their_way.remove(order)
        if order.is_lost and not order.cancelled:  # its node died with a part of it
            self._lost(seat, "a part of its gradient was lost", [order])
            return
        self._happened.append((order, order.answer))
        self._leave(seat)

    def _failed_call(self, kind: str, seat: Seat, order: Order | None, error: Exception) -> None:
        """The call itself failed: an object it needs is gone, or its code cannot be loaded over there."""
        if kind == "taken":
            assert order is not None
            self._taken(seat, order, well=False)
            return
        if order is not None and order in seat.orders:
            seat.orders.remove(order)
        self._lost(seat, first_line(error), [] if order is None else [order])

    def _gone(self, kind: str, seat: Seat, order: Order | None, error: Exception) -> None:
        if kind == "taken":
            raise LearnerLost("a shard of the learner is gone") from error
        if order is not None and order not in seat.orders:
            return  # of a life that has ended
        self._lost(seat, first_line(error), surely=isinstance(error, ActorDiedError))

    # ------------------------------------------------------------ losses

    def _lost(self, seat: Seat, why: str, more: list[Order] | None = None, surely: bool = False) -> None:
        """A worker is gone, or of no more use; `surely`: its process cannot write any more."""
        was_ready = seat.ready is not None
        orders = [*(more or []), *seat.orders, *([] if seat.held is None else [seat.held])]
        self._end_life(seat, surely)
        if seat.told is not None or seat.nodes_at_start <= self._nodes():  # else it may be its node that failed
            seat.failures += 1
            self._judge(seat, orders, was_ready, why)
        heapq.heappush(self._restarts, (monotonic() + back_off_s(seat.failures), seat.number))
        self._happened.append(Loss(seat.number, orders, was_ready))

    def _end_life(self, seat: Seat, surely: bool) -> None:
        if seat.ready is not None:
            self._left(seat.ready.node)
        if not surely and seat.life is not None:
            # What it might yet write to is not used again before Ray says that it is gone.
            self._lingering[seat.life] = [order.gradient for order in seat.orders]
            for order in seat.orders:
                order.gradient = Gradient(-1)
        with contextlib.suppress(Exception):  # it may be gone already
            ray.kill(seat.actor, no_restart=True)
        mine = [reference for reference, pending in self._pending.items() if pending.seat is seat]
        for reference in mine:
            if self._pending[reference].kind != "taken":
                del self._pending[reference]
        for order in seat.on_their_way:  # what is under way arrives, but nobody waits for it any more
            order.cancelled = True
        self._to_tell.pop(seat.number, None)
        seat.orders.clear()
        seat.held = seat.actor = seat.ready = seat.life = seat.ping = None
        seat.on_their_way = []
        self._look_who_is_elsewhere()

    def _judge(self, seat: Seat, orders: list[Order], was_ready: bool, why: str) -> None:
        """End the run where another try would be no use."""
        told = seat.told
        if told is not None and told.batch >= 0:
            self._failures.at_batch(seat.number, told.batch, seat.failures, told.text)
        elif not was_ready:
            self._failures.at_start(
                seat.number, seat.failures, None if told is None else told.text, lambda: f"ended: {why}"
            )
        elif told is None and orders:
            self._failures.died(seat.number, orders[0].ticket.batch, lambda: f"ended: {why}")

    def _look_for_lost(self, now: float) -> None:
        """End those who have not answered for too long, and those whose nodes are about to go."""
        if now >= self._drain_at:
            self._drain_at = now + _DRAIN_EVERY_S
            leaving = self._draining()
            for seat in self.seats:
                if seat.ready is not None and seat.ready.node in leaving:
                    seat.leaves = True
                    self._leave(seat, at_once=leaving[seat.ready.node] < LAST_MOMENT_S)
        for seat in self.seats:
            if seat.ready is None or not seat.orders:
                continue
            late = now - seat.waiting_since
            limits = self._times.limits(seat.has_answered)
            if late > limits.hanging:
                self._end(seat, f"it had not answered for {late:.0f} s")
            elif late > max(1.0, limits.stopped):
                self._ping(seat, now)

    def _ping(self, seat: Seat, now: float) -> None:
        """Ask a worker that is late whether it is there at all: a stopped process is not."""
        if seat.ping is None:
            seat.ping, seat.ping_since = seat.actor.ping.remote(), now
        elif ray.wait([seat.ping], timeout=0)[0]:
            seat.ping = seat.actor.ping.remote() if now - seat.ping_since > 1.0 else seat.ping
            seat.ping_since = now
        elif now - seat.ping_since > PING_S:
            self._end(seat, f"it had not even answered a ping for {now - seat.ping_since:.0f} s")

    def _end(self, seat: Seat, why: str) -> None:
        """Give up a worker whose process may still be there."""
        self._lost(seat, f"it was killed, since {why}")

    def _leave(self, seat: Seat, at_once: bool = False) -> None:
        """Take a worker from a node that is about to go; what it does is finished, if there is time."""
        if seat.ready is None or not seat.leaves or ((seat.orders or seat.on_their_way) and not at_once):
            return
        orders = [*seat.orders, *([] if seat.held is None else [seat.held])]
        self._end_life(seat, surely=False)
        heapq.heappush(self._restarts, (monotonic(), seat.number))
        self._happened.append(Loss(seat.number, orders, True))

    # ------------------------------------------------------------ from outside

    def lose(self, worker: int) -> None:
        """Kill a worker, as a script of faults says."""
        actor = self.seats[worker].actor
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def forget_orders(self) -> list[Order]:
        """The run steps back: what workers do is over. Gives the orders nobody will answer any more."""
        over = []
        for seat in self.seats:
            for order in (*seat.orders, *seat.on_their_way):
                order.cancelled = order.forgotten = True
                order.gradient.objects = []
            for order in seat.on_their_way:
                order.gradient = Gradient(-1)  # a shard may yet write to it
                over.append(order)
            seat.on_their_way = []
            if seat.held is not None:
                over.append(seat.held)
                seat.held = None
            if seat.orders:
                self._to_tell[seat.number] = seat.orders[-1].serial
        for reference, pending in list(self._pending.items()):
            if pending.kind == "taken":  # by a shard that may be gone; the room it might yet write to is not used again
                del self._pending[reference]
        over += [one[0] for one in self._happened if isinstance(one, tuple)]
        self._happened = [one for one in self._happened if not isinstance(one, tuple)]
        return over

    def take_untold(self) -> list[Happening]:
        """What has happened and was not told; it is not told later either."""
        happened, self._happened = self._happened, []
        return happened

    def move_to(self, cut: Cut, answers: Callable[[str], bool]) -> None:
        """The learner is elsewhere now: tell the workers that are there; others are told when they begin.

        answers: whether a node does.
        """
        self.cut = cut
        self._tell_cancelled()
        alive = {node: answers(node) for node in {seat.ready.node for seat in self.seats if seat.ready is not None}}
        told = {}
        for seat in self.seats:
            if seat.ready is not None and alive[seat.ready.node]:
                told[seat.number] = seat.actor.attach.remote(cut)
                seat.cut = cut
            elif seat.ready is not None:
                self._lost(seat, "its node is gone")
        if told:
            ray.wait(list(told.values()), num_returns=len(told), timeout=MOVE_S)
        for number, reference in told.items():
            seat = self.seats[number]
            try:
                seat.ready = ray.get(reference, timeout=0)
            except RayError as error:
                self._end(seat, f"it did not follow the learner ({first_line(error)})")
        self._look_who_is_elsewhere()

    def close(self) -> None:
        for seat in self.seats:
            if seat.actor is not None:
                with contextlib.suppress(Exception):
                    ray.kill(seat.actor, no_restart=True)
                seat.actor = None
        self._pending.clear()


def _why_gone(reference: Any) -> str:
    try:
        ray.get(reference, timeout=1)
    except (RayError, QuorateError) as error:
        return first_line(error)
    return "ended"
