"""What a script and its DataLoader see of `quorate.Sampler`."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from quorate.data_parallel.sampler import Sampler
from quorate.errors import BadInput, QuorateError
from quorate.ledger import Ledger

pytestmark = pytest.mark.data_parallel

SAMPLES, BATCH, WORKERS = 23, 2, 5


def bound_sampler(worker: int, **options: Any) -> Sampler:
    sampler = Sampler(SAMPLES, BATCH, **options)
    sampler.bind(worker, WORKERS, decided=False)
    return sampler


def a_pass(sampler: Sampler, steps: int | None = None, loader: Any = None) -> list[list[int]]:
    """Train for a pass, or so many steps of it."""
    batches = []
    for number, batch in enumerate(sampler if loader is None else loader, start=1):
        batches.append([int(one) for one in batch])
        if number % sampler.accumulate == 0:
            sampler.stepped(0)
        if number == steps:
            break
    return batches


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


# ---------------------------------------------------------------- every process is in every round


def test_workers_share_an_epoch_as_the_ledger_cuts_it() -> None:
    ledger = Ledger(SAMPLES, BATCH, seed=3)
    for epoch in range(2):
        shares = []
        for worker in range(WORKERS):
            sampler = bound_sampler(worker, seed=3)
            sampler.set_epoch(epoch)
            assert sampler.epoch == epoch
            shares.append(a_pass(sampler))
        assert [len(share) for share in shares] == [3, 3, 2, 2, 2]
        for worker, share in enumerate(shares):
            assert share == [ledger.indices(12 * epoch + place * WORKERS + worker) for place in range(len(share))]
        used = Counter(sample for share in shares for batch in share for sample in batch)
        assert used == Counter(range(SAMPLES))


def test_a_loader_has_a_length_before_the_model_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are made of it, so it is the same in every process: that of process 0, whose schedule counts."""
    monkeypatch.setenv("WORLD_SIZE", str(WORKERS))
    for worker, share in ((0, 6), (4, 4)):
        sampler = Sampler(22, 1, accumulate=2)
        loader = DataLoader(numbers(22), batch_sampler=sampler)
        assert len(loader) == len(sampler) == 6
        sampler.bind(worker, WORKERS, decided=False)
        assert len(loader) == share


def test_epochs_follow_by_themselves_and_differ() -> None:
    sampler = bound_sampler(1)
    first, second = a_pass(sampler), a_pass(sampler)
    assert len(first) == len(second) == len(sampler) == 3
    assert first != second
    assert sampler.epoch == 2


def test_who_has_no_batch_in_the_last_round_sits_it_out() -> None:
    assert [bound_sampler(4).sits_out(round) for round in range(7)] == [False, False, True, False, False, True, False]
    assert not any(bound_sampler(1).sits_out(round) for round in range(7))


def test_a_worker_knows_how_many_samples_each_of_its_batches_has() -> None:
    sampler = bound_sampler(1)  # which has the last batch of the epoch, the short one
    seen = []
    for _ in sampler:
        seen.append(sampler.samples_in_hand)
        sampler.stepped(0)
    assert seen == [2, 2, 1]


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("loading", [0, 2])
def test_a_data_loader_may_load_ahead(loading: int) -> None:
    sampler = bound_sampler(0)
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=loading)
    passes = [a_pass(sampler, loader=loader) for _ in range(2)]
    alone = bound_sampler(0)
    assert passes == [a_pass(alone) for _ in range(2)]


def test_several_batches_can_make_a_step() -> None:
    sampler = Sampler(22, 2, accumulate=3)  # steps of 6, 6, 6 and 4 samples
    sampler.bind(0, 2, decided=False)
    batches = a_pass(sampler)
    assert [len(batch) for batch in batches] == [2, 2, 2, 2, 2, 2]
    other = Sampler(22, 2, accumulate=3)
    other.bind(1, 2, decided=False)
    rest = a_pass(other)
    assert [len(batch) for batch in rest] == [2, 2, 2, 1, 1, 2]
    assert len(other) == 6
    assert Counter(sample for batch in [*batches, *rest] for sample in batch) == Counter(range(22))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_pass_that_was_left_goes_on_in_the_next(steps: int) -> None:
    sampler = bound_sampler(0)
    begun = a_pass(sampler, steps)
    assert begun + a_pass(sampler) == a_pass(bound_sampler(0))
    assert sampler.epoch == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_a_resumed_sampler_goes_on_where_it_was(steps: int) -> None:
    uninterrupted = bound_sampler(2, seed=5)
    before = bound_sampler(2, seed=5)
    expected = [batch for _ in range(3) for batch in a_pass(uninterrupted)]
    done: list[list[int]] = []
    while len(done) < steps:
        done += a_pass(before, min(2, steps - len(done)))
    state = json.loads(json.dumps(before.state()))
    after = Sampler(SAMPLES, BATCH, seed=5)
    after.restore(state)
    after.bind(2, WORKERS, decided=False)
    while len(done) < len(expected):
        done += a_pass(after)
    assert done == expected


@pytest.mark.parametrize("before", [1, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 4, 11])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4, 6])
def test_another_number_of_processes_goes_on_with_what_is_left(before: int, after: int, rounds: int) -> None:
    """Each sample counts once an epoch, and all processes make the same number of passes."""
    used: list[Counter[int]] = [Counter(), Counter(), Counter()]
    state: dict[str, Any] = {}
    for worker in reversed(range(before)):  # worker 0's state is saved
        sampler = Sampler(SAMPLES, BATCH, seed=5)
        sampler.bind(worker, before, decided=False)
        for _ in range(rounds):
            if not sampler.sits_out(_):
                epoch = sampler.epoch
                used[epoch].update(sample for batch in a_pass(sampler, 1) for sample in batch)
        state = json.loads(json.dumps(sampler.state()))
    first = []
    for worker in range(after):
        sampler = Sampler(SAMPLES, BATCH, seed=5)
        sampler.restore(state)
        sampler.bind(worker, after, decided=False)
        first.append(sampler.epoch)
        while (epoch := sampler.epoch) < 3:
            used[epoch].update(sample for batch in a_pass(sampler) for sample in batch)
            assert sampler.epoch == epoch + 1
    assert len(set(first)) == 1
    assert used == [Counter(range(SAMPLES))] * 3


def test_set_epoch_comes_through_the_loader_and_under_quorums() -> None:
    rows = numbers(12)
    order = Ledger(12, 2, seed=1)
    for decided in (False, True):
        sampler = Sampler(rows, 2, seed=1)
        lender = Lender(sampler, [0, 1, 2, 3, 4, 5, 6], 6)
        sampler.bind(0, 1, decided, lender)
        loader: Any = DataLoader(rows, batch_sampler=sampler, collate_fn=_first)
        loader.sampler.set_epoch(4)
        assert sampler.epoch == 4
        if decided:
            sampler.heard({"kind": "epoch_over", "epoch": 0})
        assert a_pass(sampler, loader=loader)[0] == order.indices(4 * 6)
        loader.sampler.set_epoch(9)
        assert sampler.epoch == 5, "the next epoch follows by itself"
        after = Sampler(12, 2, seed=1)
        after.restore(json.loads(json.dumps(sampler.state())))
        after.bind(0, 1, decided, lender)
        DataLoader(rows, batch_sampler=after).sampler.set_epoch(0)  # type: ignore[attr-defined]
        assert after.epoch == 5


# ---------------------------------------------------------------- batches are lent


class Lender:
    """Answers a sampler's questions, as the coordinator would, from a list of batches."""

    def __init__(self, sampler: Sampler, batches: list[int], per_epoch: int) -> None:
        self._sampler, self._batches, self._per_epoch = sampler, batches, per_epoch
        self.asked: list[dict[str, Any]] = []
        self._lent = 0
        self._has_asked = threading.Condition()

    def wait_for_questions(self, count: int) -> None:
        """The sampler then waits, or is about to."""
        with self._has_asked:
            assert self._has_asked.wait_for(lambda: len(self.asked) >= count, timeout=30)

    def __call__(self, kind: str, **fields: Any) -> None:
        assert kind == "want"
        with self._has_asked:
            self.asked.append(fields)
            self._has_asked.notify_all()
        while self._lent < fields["total"] and self._batches and self._batches[0] // self._per_epoch <= fields["epoch"]:
            self.lend(self._batches.pop(0))
        if self._lent < fields["total"]:
            self._sampler.heard({"kind": "none", "ask": fields["ask"], "stay": False})

    def lend(self, batch: int, version: int | None = None) -> None:
        self._lent += 1
        epoch = batch // self._per_epoch
        self._sampler.heard({"kind": "lent", "batch": batch, "epoch": epoch, "version": version})


def lent(batches: list[int], catch_up: Any = None) -> tuple[Sampler, Lender]:
    """A sampler of six batches of two to whom these are lent."""
    sampler = Sampler(12, 2, seed=1)
    lender = Lender(sampler, batches, 6)
    sampler.bind(0, 2, True, lender, catch_up)
    return sampler, lender


def soon(action: Any) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_a_pass_waits_for_batches_that_may_come_back() -> None:
    sampler, lender = lent([0, 1])
    order = Ledger(12, 2, seed=1)
    passes: list[list[list[int]]] = []
    thread = soon(lambda: passes.append(a_pass(sampler)))
    lender.wait_for_questions(3)
    assert thread.is_alive()
    lender.lend(4)  # somebody dropped it
    lender.wait_for_questions(4)
    sampler.heard({"kind": "epoch_over", "epoch": 0})
    thread.join(10)
    assert passes == [[order.indices(batch) for batch in (0, 1, 4)]]
    assert sampler.epoch == 1


def test_what_is_lent_before_a_process_is_ready_for_it_is_not_lost() -> None:
    sampler = Sampler(12, 2, seed=1)
    sampler.heard({"kind": "lent", "batch": 5, "epoch": 0, "version": 0})
    sampler.bind(1, 2, True, lambda kind, **fields: None)
    sampler.heard({"kind": "epoch_over", "epoch": 0})
    assert a_pass(sampler) == [Ledger(12, 2, seed=1).indices(5)]


def test_a_batch_of_the_next_epoch_ends_the_pass_too() -> None:
    sampler, lender = lent([])
    lender.lend(0)
    lender.lend(7)
    assert len(a_pass(sampler)) == 1
    sampler.heard({"kind": "epoch_over", "epoch": 1})
    assert a_pass(sampler) == [Ledger(12, 2, seed=1).indices(7)]


def test_a_loader_that_asks_ahead_does_not_wait_while_it_holds_a_batch() -> None:
    sampler, lender = lent([0, 1, 2])
    loader = DataLoader(numbers(12), batch_sampler=sampler, num_workers=1, collate_fn=_first)
    assert len(a_pass(sampler, loader=loader)) == 3
    assert sampler.epoch == 1
    lender.lend(3)  # came back: what is left of the epoch is in the next pass
    lender.lend(6)
    assert len(a_pass(sampler, loader=loader)) == 2
    assert all(question["epoch"] <= 1 for question in lender.asked)


def _first(rows: list[tuple[torch.Tensor]]) -> list[int]:
    return [int(row[0]) for row in rows]


def test_it_goes_on_from_the_version_that_a_batch_is_meant_for() -> None:
    caught: list[int] = []

    def catch_up(version: int) -> int:
        caught.append(version)
        return version + 1

    sampler, lender = lent([], catch_up)
    lender.lend(0, version=0)
    lender.lend(1, version=4)
    lender.lend(2, version=5)
    lender.lend(3, version=None)
    sampler.heard({"kind": "epoch_over", "epoch": 0})
    for number, _ in enumerate(sampler):
        sampler.stepped(5 if number else 1)
    assert caught == [4], "it has version 5 already when the next is meant for that"


def test_what_was_handed_out_and_never_computed_is_handed_out_again() -> None:
    sampler, _ = lent([0, 1, 2])
    passing = iter(sampler)
    taken = [next(passing), next(passing)]
    sampler.stepped(1)
    again = iter(sampler)
    assert next(again) == taken[1]
    sampler.stepped(2)
    assert next(again) == Ledger(12, 2, seed=1).indices(2)


def test_whoever_waits_hears_of_a_failure() -> None:
    sampler, lender = lent([])
    errors: list[Exception] = []

    def train() -> None:
        try:
            a_pass(sampler)
        except QuorateError as error:
            errors.append(error)

    thread = soon(train)
    lender.wait_for_questions(1)
    sampler.failed(QuorateError("process 3 died"))
    thread.join(10)
    assert [str(error) for error in errors] == ["process 3 died"]


def test_when_the_run_is_over_so_is_every_pass() -> None:
    sampler, lender = lent([])
    thread = soon(lambda: a_pass(sampler))
    lender.wait_for_questions(1)
    sampler.heard({"kind": "over", "reason": "all workers have finished"})
    thread.join(10)
    assert not thread.is_alive()
    assert a_pass(sampler) == []


def test_a_lent_sampler_saves_the_epoch() -> None:
    sampler, _ = lent([0])
    sampler.heard({"kind": "epoch_over", "epoch": 0})
    a_pass(sampler)
    after = Sampler(12, 2, seed=1)
    after.restore(json.loads(json.dumps(sampler.state())))
    after.bind(0, 2, True, lambda kind, **fields: None)
    assert after.epoch == 1
    assert len(after) == 3


# ---------------------------------------------------------------- bad input


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 2), {}, "number of samples is 0, but it must be at least 1"),
        (([], 2), {}, "number of samples is 0, but it must be at least 1"),
        ((True, 2), {}, "must be a whole number"),
        ((Endless(), 2), {}, "Endless has no length"),
        ((10, 0), {}, "batch_size is 0, but it must be at least 1"),
        ((10, 2.5), {}, "batch_size is 2.5, but it must be a whole number"),
        ((10, 11), {}, "the data set has only 10 samples; choose a batch of at most 10"),
        ((10, 2), {"accumulate": 0}, "accumulate is 0"),
        ((10, 4), {"accumulate": 3}, "4 × accumulate 3 makes 12 samples .* only 10; lower either"),
        ((13, 2), {"accumulate": 3}, "would have 1 samples for 3 batches; choose another batch_size"),
        ((10, 2), {"seed": "x"}, "seed is 'x', but it must be a whole number"),
    ],
)
def test_what_makes_no_sampler(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Sampler(*arguments, **options)


def test_a_sampler_must_belong_to_a_model() -> None:
    sampler = Sampler(10, 2)
    for ask in (iter, lambda one: one.sits_out(0), lambda one: one.stepped(0)):
        with pytest.raises(BadInput, match=r"belongs to no model yet.*DataParallel\(…, sampler=sampler\)"):
            ask(sampler)
    sampler.bind(0, 2, decided=False)
    with pytest.raises(BadInput, match="belongs to a model already"):
        sampler.bind(0, 2, decided=False)


def test_every_worker_needs_a_batch() -> None:
    with pytest.raises(BadInput, match=r"3 batches, but there are 4 workers.*choose a smaller batch_size"):
        Sampler(6, 2).bind(0, 4, decided=False)


def test_a_step_needs_a_batch() -> None:
    sampler = bound_sampler(0)
    next(iter(sampler))
    sampler.stepped(0)
    with pytest.raises(BadInput, match=r"no new batch of the sampler.*accumulate"):
        sampler.stepped(0)
    with pytest.raises(BadInput, match="no new batch of the sampler"):
        _ = sampler.samples_in_hand


def test_a_pass_with_fewer_steps_than_batches_is_noticed() -> None:
    sampler = bound_sampler(0)
    for number, _ in enumerate(sampler):
        if number % 2:
            sampler.stepped(0)
    with pytest.raises(BadInput, match=r"3 batches, but optimizer.step\(\) was called only 1 times.*accumulate"):
        iter(sampler)


def test_a_checkpoint_of_another_sampler_is_refused() -> None:
    state = bound_sampler(0).state()
    with pytest.raises(BadInput, match="has samples 23, this one 24; make it as it was"):
        Sampler(24, 2).restore(state)
