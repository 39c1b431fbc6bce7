"""The order book of the local and the Ray engine: which orders are sent, which wait, and how losses are counted."""

from __future__ import annotations

from typing import Any

import pytest

from quorate.engines.shared import order_book
from quorate.engines.shared.messages import AbandonedAnswer, DoneAnswer, FailedAnswer, RefusedAnswer
from quorate.engines.shared.order_book import Loss, Order, OrderBook
from quorate.engines.shared.worker_health import Failures
from quorate.events import Ticket

DONE = DoneAnswer(0, 0.5, 0.0, 0.1, False)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the order book reads."""
    now = [100.0]
    monkeypatch.setattr(order_book, "monotonic", lambda: now[0])
    return now


def order(number: int, delay_s: float = 0.0) -> Order:
    return Order(Ticket(number, 3, 1, 0, 10 + number, 8), None, None, delay_s)


def test_two_orders_are_sent_and_the_third_waits_for_an_answer() -> None:
    book, (first, second, third) = OrderBook(3), [order(number) for number in range(3)]
    assert [book.add(one) for one in (first, second, third)] == [True, True, False]
    assert book.unfinished() == [first, second, third]
    assert book.orders.popleft() is first
    assert book.answered(DONE) is third
    assert list(book.orders) == [second, third] and book.held is None
    book.orders.popleft()
    assert book.answered(DONE) is None
    book.clear()
    assert book.unfinished() == []


def test_an_order_is_taken_back_only_if_it_was_not_sent() -> None:
    book, (first, second, third) = OrderBook(3), [order(number) for number in range(3)]
    for one in (first, second, third):
        book.add(one)
    assert book.take_back(first.ticket) is None
    assert book.take_back(third.ticket) is third
    assert book.take_back(third.ticket) is None
    assert book.unfinished() == [first, second]
    book.orders.popleft()
    assert book.answered(DONE) is None


def test_a_worker_is_late_from_when_it_could_begin(clock: list[float]) -> None:
    book = OrderBook(3)
    book.add(order(0, delay_s=2.0))
    assert book.waiting_since == 102.0
    clock[0] = 101.0
    book.add(order(1, delay_s=5.0))
    assert book.waiting_since == 102.0
    clock[0] = 103.0
    book.orders.popleft()
    book.answered(DONE)
    assert book.waiting_since == 108.0


@pytest.mark.parametrize(("answer", "failures"), [(DONE, 0), (RefusedAnswer(0), 0), (AbandonedAnswer(0, 0.1), 2)])
def test_an_answer_ends_the_failures_in_a_row_unless_it_is_of_a_cancelled_order(answer: Any, failures: int) -> None:
    book = OrderBook(3, failures=2)
    book.answered(answer)
    assert (book.failures, book.has_answered) == (failures, failures == 0)
    book.restart()
    assert (book.failures, book.has_answered) == (failures, False)


class RecordedFailures(Failures):
    """Remembers which kind of failure was counted, and at which batch."""

    def __init__(self) -> None:
        self.counted: list[tuple[str, int]] = []

    def at_batch(self, worker: int, batch: int, *_: Any) -> None:
        self.counted.append(("exception", batch))

    def at_start(self, worker: int, in_a_row: int, told: str | None, *_: Any) -> None:
        self.counted.append((f"start: {told}", -1))

    def hung(self, worker: int, batch: int, *_: Any) -> None:
        self.counted.append(("hung", batch))

    def died(self, worker: int, batch: int, *_: Any, expected: bool) -> None:
        self.counted.append(("died", batch))


TOLD = FailedAnswer(-1, -1, False, "no file")


@pytest.mark.parametrize(
    ("state", "was_ready", "orders", "counted"),
    [
        ({"error": FailedAnswer(0, 10, False, "text")}, True, 1, [("exception", 10)]),
        ({"hangs": True}, True, 1, [("hung", 10)]),
        ({"hangs": True}, False, 0, [("hung", -1)]),
        ({"error": TOLD}, False, 0, [("start: no file", -1)]),
        ({}, False, 0, [("start: None", -1)]),
        ({}, True, 2, [("died", 10)]),
        ({}, True, 0, []),  # it died while it had nothing to do
    ],
)
def test_a_loss_is_counted_by_its_kind(
    state: dict[str, Any], was_ready: bool, orders: int, counted: list[tuple[str, int]]
) -> None:
    failures = RecordedFailures()
    loss = Loss(3, [order(number) for number in range(orders)], was_ready)
    OrderBook(3, **state).report(failures, loss, "it slept", lambda: "ended", expected=False)
    assert failures.counted == counted
