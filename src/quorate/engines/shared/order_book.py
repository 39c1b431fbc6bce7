"""The order book of a worker: the tickets it was sent and has not answered, and its failures in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from quorate.engines.shared import messages
from quorate.engines.shared.worker_health import Failures
from quorate.events import Ticket

#: Orders that a worker is sent before it answers. With the second it continues at once when the first is over.
UNANSWERED = 2


@dataclass
class Order:
    """A ticket for a worker, with the version it reads and the memory for its gradient."""

    ticket: Ticket
    version: Any
    gradient: Any
    delay_s: float  # injected latency, before computing
    packet: bytes = b""
    cancelled: bool = False
    answer: messages.Answer = None  # kept while the gradient is transferred to other machines
    parts_left: int = 0  # parts of the gradient that are still transferred
    is_lost: bool = False  # a part was lost during the transfer
    forgotten: bool = False  # the run was rolled back to an earlier version, and its answer is ignored
    serial: int = 0  # identifies the order, because ticket numbers repeat after a rollback


@dataclass
class Loss:
    """A lost worker and its unanswered orders."""

    worker: int
    orders: list[Order]
    was_ready: bool


@dataclass
class OrderBook:
    """The orders of one worker, and the health of its current process."""

    number: int
    orders: deque[Order] = field(default_factory=deque)  # sent and not answered, oldest first
    held: Order | None = None  # not sent: the worker has not noticed yet that two others are cancelled
    waiting_since: float = 0.0  # when the worker could begin with the oldest order
    has_answered: bool = False  # since the start of this process
    failures: int = 0  # since the last answer
    error: messages.FailedAnswer | None = None  # the exception that ended the process
    hangs: bool = False  # the process is killed because it did not answer

    def restart(self) -> None:
        """A new process takes over."""
        self.error, self.has_answered, self.hangs = None, False, False
        self.waiting_since = monotonic()

    def add(self, order: Order) -> bool:
        """Add an order; False if it must not be sent yet."""
        if len(self.orders) >= UNANSWERED:
            self.held = order
            return False
        if not self.orders:
            self.waiting_since = monotonic() + order.delay_s
        self.orders.append(order)
        return True

    def take_back(self, ticket: Ticket) -> Order | None:
        """Remove and return the order of this ticket if it was not sent."""
        if self.held is None or self.held.ticket is not ticket:
            return None
        order, self.held = self.held, None
        return order

    def answered(self, answer: messages.Answer) -> Order | None:
        """The worker has answered an order, which the caller has removed; returns the next order to send, if any."""
        if not isinstance(answer, messages.AbandonedAnswer):
            self.failures, self.has_answered = 0, True
        held, self.held = self.held, None
        if held is not None:
            self.orders.append(held)
        self.waiting_since = monotonic() + (self.orders[0].delay_s if self.orders else 0.0)
        self.hangs = False
        return held

    def unfinished(self) -> list[Order]:
        """Orders without an answer, sent or not."""
        return [*self.orders] if self.held is None else [*self.orders, self.held]

    def clear(self) -> None:
        self.orders.clear()
        self.held = None

    def report(
        self, failures: Failures, loss: Loss, why_hung: str, how_it_ended: Callable[[], str], *, expected: bool
    ) -> None:
        """Count the loss of the worker; raises WorkerFailed if a retry cannot help."""
        error, batch = self.error, loss.orders[0].ticket.batch if loss.was_ready and loss.orders else -1
        if error is not None and error.batch >= 0:
            failures.at_batch(self.number, error.batch, self.failures, error.text)
        elif self.hangs:
            failures.hung(self.number, batch, self.failures, why_hung)
        elif not loss.was_ready:
            failures.at_start(self.number, self.failures, None if error is None else error.text, how_it_ended)
        elif error is None and loss.orders:
            failures.died(self.number, batch, how_it_ended, expected=expected)
