"""The worker processes of a run, in the main process: sends orders, receives answers, replaces lost processes."""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import socket
from dataclasses import dataclass
from functools import partial
from time import monotonic, monotonic_ns

from quorate.engines.local.fork_server import WorkerProcesses, how_it_ended, kill, process_state
from quorate.engines.local.worker import STAGES, STARTING
from quorate.engines.shared import messages
from quorate.engines.shared.order_book import Loss, Order, OrderBook
from quorate.engines.shared.real_time import Happening
from quorate.engines.shared.shared_memory import Block, ControlWords
from quorate.engines.shared.worker_health import AnswerTimes, Failures, back_off_s
from quorate.errors import BadInput
from quorate.events import Ticket

_CHECK_EVERY_S = 0.1


@dataclass
class WorkerRecord(OrderBook):
    """One worker, through all its processes."""

    connection: socket.socket | None = None
    pid: int = 0
    ready: bool = False
    cpu_s: float = -1.0  # CPU time at the last check of a late worker
    idle_since: float = 0.0  # when the CPU time last changed
    why_killed: str | None = None  # set if the main process killed it
    scripted: bool = False  # a fault script killed it


class LocalWorkers:
    """The worker processes of a run. `wait` drives everything; there are no other threads."""

    def __init__(self, workers: int, pool: WorkerProcesses, control: ControlWords, patience_s: float) -> None:
        self._pool, self._words = pool, control.words
        self._records = [WorkerRecord(number) for number in range(workers)]
        self._poll = select.epoll()
        self._by_descriptor: dict[int, WorkerRecord] = {}
        self._restarts: list[tuple[float, int]] = []
        self._failures = Failures()
        self._times = AnswerTimes(patience_s)
        self._next_check = 0.0

    # ------------------------------------------------------------ orders

    def start(self, worker: int) -> None:
        """Start a new process for a worker."""
        record = self._records[worker]
        self._set_word(worker, ControlWords.STAGE, STARTING)
        record.connection, record.pid = self._pool.start(worker)
        record.connection.setblocking(False)
        record.restart()
        record.ready, record.cpu_s, record.why_killed, record.scripted = False, -1.0, None, False
        self._by_descriptor[record.connection.fileno()] = record
        self._poll.register(record.connection, select.EPOLLIN)

    def send(self, ticket: Ticket, version: Block, gradient: Block, next_batch: int, delay_s: float) -> None:
        record = self._records[ticket.worker]
        work = messages.TicketOrder(
            ticket.id, ticket.version, ticket.batch, version.number, gradient.number, next_batch, delay_s
        )
        order = Order(ticket, version, gradient, delay_s, messages.pack_start(work))
        self._set_word(ticket.worker, ControlWords.TICKET, ticket.id)
        if record.add(order):
            _send(record, order.packet)

    def cancel(self, ticket: Ticket) -> Order | None:
        """Tell a worker that its ticket is cancelled; returns the order if it was never sent."""
        self._set_word(ticket.worker, ControlWords.CANCELLED_AT, monotonic_ns())
        self._set_word(ticket.worker, ControlWords.TICKET, -1)
        record = self._records[ticket.worker]
        never_sent = record.take_back(ticket)
        if never_sent is None:
            for order in record.orders:
                if order.ticket is ticket:
                    order.cancelled = True
        return never_sent

    def _set_word(self, worker: int, word: int, value: int) -> None:
        self._words[worker * ControlWords.WORDS + word] = value

    # ------------------------------------------------------------ answers

    def wait(self, timeout_s: float | None) -> list[Happening]:
        """Wait until something happens, for at most `timeout_s`, and return what happened."""
        now = monotonic()
        until = min(self._next_check, self._restarts[0][0]) if self._restarts else self._next_check
        if timeout_s is not None:
            until = min(until, now + timeout_s)
        happened: list[Happening] = []
        for descriptor, _ in self._poll.poll(max(0.0, until - now)):
            self._receive(self._by_descriptor[descriptor], happened)
        now = monotonic()
        while self._restarts and self._restarts[0][0] <= now:
            self.start(heapq.heappop(self._restarts)[1])
        if now >= self._next_check:
            self._next_check = now + _CHECK_EVERY_S
            self._check_silent(now, happened)
        return happened

    def _receive(self, record: WorkerRecord, happened: list[Happening]) -> None:
        """Take in all packets of a worker."""
        while record.connection is not None:
            try:
                packet = record.connection.recv(messages.PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                happened.append(self._lost(record))
                return
            self._take_in(record, messages.unpack_answer(packet), happened)

    def _take_in(self, record: WorkerRecord, answer: messages.Answer, happened: list[Happening]) -> None:
        if answer is None:
            record.ready, record.cpu_s = True, -1.0
            happened.append(record.number)
            return
        if isinstance(answer, messages.FailedAnswer):
            record.error = answer
            if answer.bad_input:
                raise BadInput(answer.text)
            return
        order = record.orders.popleft()
        assert order.ticket.id == answer.ticket, "orders are answered one by one"
        if isinstance(answer, messages.DoneAnswer):
            self._times.add(answer.data_s + answer.compute_s)
        record.cpu_s = -1.0
        held = record.answered(answer)
        if held is not None:
            _send(record, held.packet)
        happened.append((order, answer))

    # ------------------------------------------------------------ losses

    def _lost(self, record: WorkerRecord) -> Loss:
        """Clean up after a lost process and schedule the next one; raises WorkerFailed if a retry cannot help."""
        assert record.connection is not None
        self._poll.unregister(record.connection)
        del self._by_descriptor[record.connection.fileno()]
        record.connection.close()
        record.connection = None
        loss = Loss(record.number, record.unfinished(), record.ready)
        record.clear()
        record.ready = False
        record.failures += 1
        why, ended = str(record.why_killed), partial(self._how_it_ended, record)
        record.report(self._failures, loss, why, ended, expected=record.scripted)
        heapq.heappush(self._restarts, (monotonic() + back_off_s(record.failures), record.number))
        return loss

    def _check_silent(self, now: float, happened: list[Happening]) -> None:
        """Kill workers that have not answered for too long; the closed connection then reports them as lost."""
        for record in self._records:
            if record.connection is None or (record.ready and not record.orders):
                continue
            late = now - record.waiting_since
            limits = self._times.limits(record.has_answered)
            if record.ready and late < limits.stopped:
                continue
            found = process_state(record.pid)
            if found is None or found[0] in "ZX":
                happened.append(self._lost(record))  # a child process may keep the connection open
                continue
            state, cpu_s = found
            if cpu_s != record.cpu_s:
                record.cpu_s, record.idle_since = cpu_s, now
            silent = now - record.idle_since
            if state in "Tt":
                record.why_killed = "it was stopped"
                kill(record.pid)
            elif silent > limits.silent:
                self._kill_hanging(record, f"it did nothing for {silent:.0f} s")
            elif late > limits.hanging:
                self._kill_hanging(record, f"it had not answered for {late:.0f} s")

    def _kill_hanging(self, record: WorkerRecord, why: str) -> None:
        """Kill a worker that does not answer; the first one prints its stack before (SIGUSR1, see `worker.work`)."""
        if record.hangs or self._failures.has_shown_hang():
            kill(record.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGUSR1)
        if not record.hangs:
            record.hangs, record.why_killed = True, f"{why} ({self.stage(record.number)})"

    def _how_it_ended(self, record: WorkerRecord) -> str:
        if record.why_killed is not None:
            return f"was killed, since {record.why_killed}"
        return how_it_ended(self._pool.exit_status(record.pid))

    def stage(self, worker: int) -> str:
        """What a worker does, by its own account."""
        return STAGES[self._words[worker * ControlWords.WORDS + ControlWords.STAGE]]

    def pids(self) -> dict[int, int]:
        """The process number of each running worker."""
        return {record.number: record.pid for record in self._records if record.connection is not None}

    def lose(self, worker: int) -> None:
        """Kill a worker, as a fault script asks."""
        if self._records[worker].connection is not None:
            self._records[worker].scripted = True
            kill(self._records[worker].pid)

    def close(self) -> None:
        for record in self._records:
            if record.connection is not None:
                self._set_word(record.number, ControlWords.TICKET, -1)
                _send(record, messages.STOP_PACKET)
                record.connection.close()
                record.connection = None
        self._poll.close()


def _send(record: WorkerRecord, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # the process is gone; `wait` will notice the closed connection
        if record.connection is not None:
            record.connection.send(packet)
