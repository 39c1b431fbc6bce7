"""The ledger: each sample exactly once per epoch, in an order that depends on nothing but the seed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.ledger import Ledger, shuffled


def ticket(batch: int) -> Ticket:
    return Ticket(0, 0, 0, 0, batch, 1)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(samples: int, batch_size: int, seed: int) -> None:
    batch_size = min(batch_size, samples)
    ledger = Ledger(samples, batch_size, seed=seed)
    per_epoch = ledger.batches_per_epoch
    assert per_epoch is not None
    for epoch in range(3):
        seen = Counter(i for b in range(epoch * per_epoch, (epoch + 1) * per_epoch) for i in ledger.indices(b))
        assert seen == Counter(range(samples))
    assert sum(ledger.size(batch) for batch in range(per_epoch)) == samples
    assert all(len(ledger.indices(batch)) == ledger.size(batch) for batch in range(2 * per_epoch))


def test_the_order_is_a_function_of_the_seed_and_changes_with_the_epoch() -> None:
    one, same, other = Ledger(50, 5, seed=1), Ledger(50, 5, seed=1), Ledger(50, 5, seed=2)
    assert [one.indices(b) for b in range(20)] == [same.indices(b) for b in reversed(range(20))][::-1]
    assert one.indices(0) != other.indices(0)
    assert one.order(0).tolist() != one.order(1).tolist()


def test_the_order_is_the_same_on_every_machine() -> None:
    """A golden value: if it changes, recorded runs can no longer be replayed."""
    assert shuffled(10, key=12345).tolist() == [5, 0, 3, 7, 1, 4, 2, 6, 8, 9]


def test_orders_look_shuffled() -> None:
    """Each place of the order holds each sample about equally often."""
    counts = [[0] * 6 for _ in range(6)]
    for key in range(6000):
        for place, sample in enumerate(shuffled(6, key * 7919).tolist()):
            counts[place][sample] += 1
    assert all(850 < count < 1150 for row in counts for count in row)


def test_what_comes_back_goes_to_the_front() -> None:
    ledger = Ledger(100, 10)
    loans = [ledger.borrow(0) for _ in range(4)]
    assert [loan.batch for loan in loans if loan] == [0, 1, 2, 3]
    ledger.give_back(2)
    ledger.lose(1)
    assert [ledger.borrow(0).batch for _ in range(3)] == [2, 1, 4]  # type: ignore[union-attr]


def test_fresh_batches_of_a_round_come_from_one_epoch() -> None:
    ledger = Ledger(50, 10, epochs=2)
    assert all(ledger.borrow(0) for _ in range(5))
    assert ledger.borrow(0) is None, "the round takes what is left"
    assert ledger.borrow(1).batch == 5, "the next one opens the next epoch"  # type: ignore[union-attr]


def test_without_rounds_the_next_epoch_opens_at_once() -> None:
    ledger = Ledger(50, 10, epochs=2)
    assert [ledger.borrow(None).batch for _ in range(10)] == list(range(10))  # type: ignore[union-attr]
    assert ledger.borrow(None) is None
    assert not ledger.finished
    ledger.spend([ticket(batch) for batch in range(10)])
    assert ledger.finished


def test_a_batch_that_is_always_dropped_is_pinned_and_a_random_one_is_not() -> None:
    """One batch in a stream where a quarter is dropped by chance: pinned when that can no longer be chance."""
    ledger = Ledger(None, 1)
    unlucky = ledger.borrow(0)
    assert unlucky is not None
    for _ in range(300):
        loan = ledger.borrow(0)
        assert loan is not None
        ledger.spend([ticket(loan.batch)])
    for _ in range(12):
        ledger.give_back(unlucky.batch)
        again = ledger.borrow(0)
        assert again is not None and again.batch == unlucky.batch
        if again.pinned:
            break
        ledger.give_back(again.batch)
        assert ledger.borrow(0) == again
    else:
        pytest.fail("never pinned")


@pytest.mark.parametrize(
    ("samples", "batch_size", "epochs", "words"),
    [
        (0, 1, None, "empty"),
        (10, 11, None, "only 10 samples"),
        (10, 0, None, "at least 1 sample"),
        (10, 1, 0, "epochs is 0"),
        (None, 1, 3, "endless stream has no epochs"),
    ],
)
def test_bad_ledgers(samples: int | None, batch_size: int, epochs: int | None, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Ledger(samples, batch_size, epochs)
