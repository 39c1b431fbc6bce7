"""Blocks, control words and the book of who holds which block."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

from quorate.engines.shared import shared_memory
from quorate.engines.shared.shared_memory import (
    Block,
    BlockLayout,
    Blocks,
    BlockStore,
    ControlWords,
    anonymous_file,
    available_bytes,
    gigabytes,
)
from quorate.errors import BadInput
from tests.toy_tasks import batch_norm_net, mlp


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = anonymous_file("test")
    yield made
    os.close(made)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.none = nn.Parameter(torch.ones(0))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.still = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("mask", torch.ones(9, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(3))


@pytest.mark.parametrize("model", [Mixed(), mlp(), batch_norm_net()], ids=lambda model: type(model).__name__)
def test_nothing_in_a_block_overlaps(model: nn.Module) -> None:
    layout = BlockLayout(model, "fp32")
    assert layout.nbytes % shared_memory.PAGE_BYTES == 0
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    params = layout.params.views(layout.params_of(block))
    buffers = layout.buffers.views(layout.buffers_of(block))
    assert len(params) == layout.count == sum(parameter.requires_grad for parameter in model.parameters())
    expected = 0
    for number, view in enumerate([*params, *buffers, layout.mask_of(block)], start=1):
        before = int((block != 0).sum())
        view.view(torch.uint8).fill_(number) if view.dim() else view.copy_(torch.ones_like(view))
        assert int((block != 0).sum()) > before or not view.numel()
        expected += view.numel()
    for number, view in enumerate([*params, *buffers, layout.mask_of(block)], start=1):
        if view.dim():
            assert bool((view.view(torch.uint8) == number).all()), "a later one was written over it"
    runs = layout.params.runs(layout.params_of(block))
    assert sum(run.numel() * run.element_size() for run in runs) == layout.params.nbytes


def test_a_half_wire_needs_single_precision() -> None:
    assert BlockLayout(mlp(), "bf16").gradient.nbytes * 2 == BlockLayout(mlp(), "fp32").gradient.nbytes
    with pytest.raises(BadInput, match="bf16"):
        BlockLayout(Mixed(), "bf16")


def test_blocks_are_seen_by_everyone_and_begin_with_zeros(descriptor: int) -> None:
    size = shared_memory.PAGE_BYTES
    ours, theirs = Blocks(descriptor, size), Blocks(descriptor, size)
    numbers = [ours.add() for _ in range(3)]
    assert numbers == [0, 1, 2] and os.fstat(descriptor).st_size == 3 * size
    ours.block(1).fill_(7)
    assert theirs.block(1).sum() == 7 * size and theirs.block(0).sum() == theirs.block(2).sum() == 0
    assert ours.block(1) is ours.block(1)
    kept = ours.block(1)
    ours.forget()
    assert kept.sum() == 7 * size and ours.block(1) is not kept
    kept.fill_(8)
    assert theirs.block(1)[0] == 8


def test_a_block_without_memory_is_bad_input(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout(mlp(), "fp32")
    store = BlockStore(layout, Blocks(descriptor, layout.nbytes))
    store.take()

    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BadInput, match=r"no memory for another block of .* beside the 1 there are: No space left"):
        store.take()


def test_control_words_are_a_line_for_each_worker(descriptor: int) -> None:
    workers = 70
    os.ftruncate(descriptor, ControlWords.size(workers))
    ours, theirs = ControlWords(descriptor, workers), ControlWords(descriptor, workers)
    for number in range(workers):
        ours.words[number * ControlWords.WORDS + ControlWords.TICKET] = -number
    assert [theirs.words[number * ControlWords.WORDS] for number in range(workers)] == [-n for n in range(workers)]
    assert theirs.words[ControlWords.STAGE] == 0
    theirs.words[ControlWords.CANCELLED_AT] = 2**62
    assert ours.words[ControlWords.CANCELLED_AT] == 2**62
    for control in (ours, theirs):
        control.close()
        control.close()
    with pytest.raises(ValueError, match="released"):
        ours.words[0]


def test_sizes_in_words() -> None:
    assert [gigabytes(n) for n in (0, 20_000_000, 1_500_000_000)] == ["0 MB", "20 MB", "1.5 GB"]


def test_free_memory_is_what_the_tightest_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_bytes()
    assert free is not None and 0 < free < 2**50
    monkeypatch.setattr(shared_memory, "_container_free", lambda: 5)
    assert available_bytes() == 5
    monkeypatch.setattr(shared_memory, "_machine_free", lambda: None)
    assert available_bytes() == 5
    monkeypatch.setattr(shared_memory, "_container_free", lambda: None)
    assert available_bytes() is None


class Holding(RuleBasedStateMachine):
    """Random taking, holding and giving back: nobody is ever given a block that somebody else has."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptor = anonymous_file("test")
        layout = BlockLayout(mlp(), "fp32")
        self.store = BlockStore(layout, Blocks(self.descriptor, layout.nbytes))
        self.held: list[Block] = []  # once for each reason
        self.most = 0

    @rule(worker=st.none() | st.integers(0, 2))
    def take(self, worker: int | None) -> None:
        block = self.store.take(worker)
        assert block.number not in {other.number for other in self.held}
        self.held.append(block)

    @rule(place=st.integers(0, 100))
    def hold(self, place: int) -> None:
        if self.held:
            block = self.held[place % len(self.held)]
            self.store.hold(block)
            self.held.append(block)

    @rule(place=st.integers(0, 100))
    def release(self, place: int) -> None:
        if self.held:
            self.store.release(self.held.pop(place % len(self.held)))

    @invariant()
    def no_more_blocks_than_were_needed(self) -> None:
        numbers = [block.number for block in self.held]
        self.most = max(self.most, len(set(numbers)))
        assert os.fstat(self.descriptor).st_size <= self.most * self.store._layout.nbytes
        for block in self.held:
            assert self.store.held_more_than_once(block) == (numbers.count(block.number) > 1)

    def teardown(self) -> None:
        self.held.clear()
        self.store.close()
        os.close(self.descriptor)


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=50, deadline=None)


def test_a_worker_gets_its_own_block_back(descriptor: int) -> None:
    layout = BlockLayout(mlp(), "fp32")
    store = BlockStore(layout, Blocks(descriptor, layout.nbytes))
    blocks = {worker: store.take(worker) for worker in range(4)}
    for block in blocks.values():
        store.release(block)
    assert {worker: store.take(worker).number for worker in (2, 0, 3, 1)} == {w: b.number for w, b in blocks.items()}
    store.close()


def test_nothing_of_it_has_a_name(descriptor: int) -> None:
    assert Path(f"/proc/self/fd/{descriptor}").readlink().name == "memfd:test (deleted)"
    assert not any(entry.name.startswith("quorate") for entry in Path("/dev/shm").iterdir())
