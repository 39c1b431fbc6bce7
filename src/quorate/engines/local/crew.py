"""The workers of a run: orders out, answers in, and new processes for those that are lost."""

from __future__ import annotations

import contextlib
import heapq
import select
import socket
from collections import deque
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns

from quorate.engines.local.pool import Pool, how_it_ended, kill, process_state
from quorate.engines.local.worker import STAGES, STARTING
from quorate.engines.processes import messages
from quorate.engines.processes.blocks import Block
from quorate.engines.processes.failures import Failures, back_off_s
from quorate.engines.processes.live import Happening, Loss, Order
from quorate.engines.processes.memory import Control
from quorate.engines.processes.messages import Failed
from quorate.engines.processes.silence import AnswerTimes
from quorate.errors import BadInput
from quorate.events import Ticket

_LOOK_EVERY_S = 0.1
_UNANSWERED = 2  # orders a worker is sent; the second, so that it can go on at once when the first is over


@dataclass
class Seat:
    """A worker, through all its lives."""

    number: int
    connection: socket.socket | None = None
    pid: int = 0
    ready: bool = False
    orders: deque[Order] = field(default_factory=deque)  # not yet answered, oldest first
    held: Order | None = None  # not sent yet, since the worker has not even noticed that two others are over
    waiting_since: float = 0.0  # since when the oldest of them could have been answered
    cpu_s: float = -1.0  # used when last looked at while it was late
    idle_since: float = 0.0  # since when it has used none
    has_answered: bool = False  # in this life
    why_killed: str | None = None  # if it was us
    failures: int = 0  # in a row
    told: Failed | None = None  # what it said before it ended


class Crew:
    """Talks to worker processes. Everything is driven by `wait`; nothing here runs in another thread."""

    def __init__(self, workers: int, pool: Pool, control: Control) -> None:
        self._pool, self._words = pool, control.words
        self._seats = [Seat(number) for number in range(workers)]
        self._poll = select.epoll()
        self._by_descriptor: dict[int, Seat] = {}
        self._restarts: list[tuple[float, int]] = []
        self._failures = Failures()
        self._times = AnswerTimes()
        self._look_at = 0.0

    # ------------------------------------------------------------ orders

    def start(self, worker: int) -> None:
        """A new process for a worker."""
        seat = self._seats[worker]
        self._words[worker * Control.WORDS + Control.STAGE] = STARTING
        seat.connection, seat.pid = self._pool.start(worker)
        seat.connection.setblocking(False)
        seat.ready, seat.told, seat.cpu_s = False, None, -1.0
        seat.has_answered, seat.why_killed = False, None
        self._by_descriptor[seat.connection.fileno()] = seat
        self._poll.register(seat.connection, select.EPOLLIN)

    def send(self, ticket: Ticket, version: Block, gradient: Block, next_batch: int, delay_s: float) -> None:
        seat = self._seats[ticket.worker]
        work = messages.Work(
            ticket.id, ticket.version, ticket.batch, version.number, gradient.number, next_batch, delay_s
        )
        order = Order(ticket, version, gradient, delay_s, messages.pack_start(work))
        self._words[seat.number * Control.WORDS + Control.TICKET] = ticket.id
        if len(seat.orders) < _UNANSWERED:
            self._post(seat, order)
        else:
            seat.held = order

    def _post(self, seat: Seat, order: Order) -> None:
        if not seat.orders:
            seat.waiting_since, seat.cpu_s = monotonic() + order.delay_s, -1.0
        seat.orders.append(order)
        with contextlib.suppress(OSError):  # where it is gone, that will be heard
            if seat.connection is not None:
                seat.connection.send(order.packet)

    def cancel(self, ticket: Ticket) -> Order | None:
        """Let a worker know that its ticket is over; gives the order back if the worker never got it."""
        base = ticket.worker * Control.WORDS
        self._words[base + Control.CANCELLED_AT] = monotonic_ns()
        self._words[base + Control.TICKET] = -1
        seat = self._seats[ticket.worker]
        if seat.held is not None and seat.held.ticket is ticket:
            order, seat.held = seat.held, None
            return order
        for order in seat.orders:
            if order.ticket is ticket:
                order.cancelled = True
        return None

    # ------------------------------------------------------------ what happens

    def wait(self, timeout_s: float | None) -> list[Happening]:
        """What has happened, after waiting for something for at most so long."""
        now = monotonic()
        until = min(self._look_at, self._restarts[0][0]) if self._restarts else self._look_at
        if timeout_s is not None:
            until = min(until, now + timeout_s)
        happened: list[Happening] = []
        for descriptor, _ in self._poll.poll(max(0.0, until - now)):
            self._listen(self._by_descriptor[descriptor], happened)
        now = monotonic()
        while self._restarts and self._restarts[0][0] <= now:
            self.start(heapq.heappop(self._restarts)[1])
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._look_for_lost(now, happened)
        return happened

    def _listen(self, seat: Seat, happened: list[Happening]) -> None:
        while seat.connection is not None:
            try:
                packet = seat.connection.recv(messages.PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                happened.append(self._lost(seat))
                return
            self._hear(seat, messages.unpack_answer(packet), happened)

    def _hear(self, seat: Seat, answer: messages.Answer, happened: list[Happening]) -> None:
        if answer is None:
            seat.ready = True
            happened.append(seat.number)
            return
        if isinstance(answer, Failed):
            seat.told = answer
            if answer.bad_input:
                raise BadInput(answer.text)
            return
        order = seat.orders.popleft()
        assert order.ticket.id == answer.ticket, "orders are answered one by one"
        now = monotonic()
        if isinstance(answer, messages.Done):
            self._times.add(answer.data_s + answer.compute_s)
        if not isinstance(answer, messages.Abandoned):
            seat.failures, seat.has_answered = 0, True
        seat.waiting_since, seat.cpu_s = now, -1.0
        if seat.orders:
            seat.waiting_since += seat.orders[0].delay_s
        if seat.held is not None:
            order_held, seat.held = seat.held, None
            self._post(seat, order_held)
        happened.append((order, answer))

    # ------------------------------------------------------------ losses

    def _lost(self, seat: Seat) -> Loss:
        assert seat.connection is not None
        self._poll.unregister(seat.connection)
        del self._by_descriptor[seat.connection.fileno()]
        seat.connection.close()
        seat.connection = None
        loss = Loss(seat.number, [*seat.orders, *([] if seat.held is None else [seat.held])], seat.ready)
        seat.orders.clear()
        seat.held = None
        seat.ready = False
        seat.failures += 1
        self._judge(seat, loss)
        heapq.heappush(self._restarts, (monotonic() + back_off_s(seat.failures), seat.number))
        return loss

    def _judge(self, seat: Seat, loss: Loss) -> None:
        """End the run where another try would be no use."""
        told = seat.told

        def ended() -> str:
            return self._how_it_ended(seat)

        if told is not None and told.batch >= 0:
            self._failures.at_batch(seat.number, told.batch, seat.failures, told.text)
        elif not loss.was_ready:
            self._failures.at_start(seat.number, seat.failures, None if told is None else told.text, ended)
        elif told is None and loss.orders:
            self._failures.died(seat.number, loss.orders[0].ticket.batch, ended)

    def _look_for_lost(self, now: float, happened: list[Happening]) -> None:
        """End those who have not answered for too long; that they are gone is then heard as of any other."""
        for seat in self._seats:
            if seat.connection is None or (seat.ready and not seat.orders):
                continue
            late = now - seat.waiting_since if seat.orders else 0.0
            limits = self._times.limits(seat.has_answered)
            if seat.ready and late < limits.stopped:
                continue
            found = process_state(seat.pid)
            if found is None or found[0] in "ZX":
                happened.append(self._lost(seat))  # a child of its own may still hold the line open
                continue
            state, cpu_s = found
            if cpu_s != seat.cpu_s:
                seat.cpu_s, seat.idle_since = cpu_s, now
            if state in "Tt":
                self._end(seat, "it was stopped")
            elif seat.ready and now - seat.idle_since > limits.silent:
                self._end(seat, f"it did nothing for {now - seat.idle_since:.0f} s")
            elif late > limits.hanging:
                self._end(seat, f"it had not answered for {late:.0f} s")

    def _end(self, seat: Seat, why: str) -> None:
        seat.why_killed = why
        kill(seat.pid)

    def _how_it_ended(self, seat: Seat) -> str:
        if seat.why_killed is not None:
            return f"was killed, since {seat.why_killed}"
        return how_it_ended(self._pool.exit_status(seat.pid))

    def stage(self, worker: int) -> str:
        """What a worker says that it does."""
        return STAGES[self._words[worker * Control.WORDS + Control.STAGE]]

    def pids(self) -> dict[int, int]:
        """The process of each worker that has one."""
        return {seat.number: seat.pid for seat in self._seats if seat.connection is not None}

    def lose(self, worker: int) -> None:
        """Kill a worker, as a script of faults says."""
        if self._seats[worker].connection is not None:
            kill(self._seats[worker].pid)

    def close(self) -> None:
        for seat in self._seats:
            if seat.connection is not None:
                self._words[seat.number * Control.WORDS + Control.TICKET] = -1
                with contextlib.suppress(OSError):
                    seat.connection.send(messages.STOP_PACKET)
                seat.connection.close()
                seat.connection = None
        self._poll.close()
