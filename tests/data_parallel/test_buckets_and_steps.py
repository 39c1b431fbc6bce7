"""The pieces of the data plane, each on its own: buffers, order, partial steps."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quorate.data_parallel import process_group
from quorate.data_parallel.buckets import BucketLayout, PieceOrder, RoundBuffers, piece_bytes_for
from quorate.data_parallel.iterations import Stopwatch
from quorate.data_parallel.optimizer_steps import PartialSteps
from quorate.data_parallel.plane import Plane, Round
from tests.data_parallel.fake_group import Gathering

# ------------------------------------------------------------ buffers

_SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 3, 4, 4), (1, 6, 1, 3), (0, 4), (33,)])
_TYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
_ORDERS = st.sampled_from(["plain", "channels_last", "transposed", "with gaps"])


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, order: str) -> Tensor:
    made = torch.zeros(shape, dtype=dtype)
    if order == "channels_last" and len(shape) == 4:
        return made.to(memory_format=torch.channels_last)
    if order == "transposed" and len(shape) == 2:
        return torch.zeros(shape[::-1], dtype=dtype).t()
    if order == "with gaps" and shape:
        return torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
    return made


@given(
    kinds=st.lists(st.tuples(_SHAPES, _TYPES, _ORDERS), min_size=1, max_size=7),
    buffers=st.lists(st.sampled_from([torch.float32, torch.int64]), max_size=3),
    piece_bytes=st.sampled_from([None, 1, 8, 60, 4000]),
    weights=st.lists(st.sampled_from([1.0, 3.0, 0.0, 8.0]), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_what_comes_back_is_exactly_the_weighted_mean(
    kinds: list[Any], buffers: list[torch.dtype], piece_bytes: int | None, weights: list[float], seed: int
) -> None:
    parameters = [_tensor(*kind) for kind in kinds]
    state = [torch.zeros(5, dtype=dtype) for dtype in buffers]
    layout = BucketLayout(parameters, state, len(weights), piece_bytes)
    tensors, draw = [*parameters, *state], torch.Generator().manual_seed(seed)
    weights = [*weights[:-1], 2.0]  # somebody contributes
    rounds = [Round(1, RoundBuffers(layout), layout, worker, weight) for worker, weight in enumerate(weights)]
    expected: list[Tensor | None] = []
    for member, tensor in enumerate(tensors):
        total: Tensor | None = None
        for round in rounds:
            has_none = round.weight == 0 or bool(torch.rand((), generator=draw) < 0.2)
            gradient = None if has_none else torch.randint(-64, 64, tensor.shape, generator=draw).to(tensor.dtype)
            round.fill(member, gradient)
            if gradient is not None:
                part = gradient.double() * round.weight
                total = part if total is None else total + part
        expected.append(total)
    for round in rounds:
        assert all(round.ready) and round.unfilled() == []
    for bucket in layout.buckets:
        for piece in bucket.pieces:
            leaving = [round.leave(piece) for round in rounds]
            added = torch.stack(leaving).sum(0)
            for one, round in zip(leaving, rounds, strict=True):
                one.copy_(added)
                not_ready, complete = round.back(piece)
                assert set(not_ready) <= {0.0} and complete == piece.is_last
    for round in rounds:
        assert round.weights == weights
        assert round.contributors() == [worker for worker, weight in enumerate(weights) if weight]
        found: dict[int, Tensor] = {}
        for bucket in layout.buckets:
            found |= round.averages(bucket.number)
        for member, (tensor, total) in enumerate(zip(tensors, expected, strict=True)):
            assert (member in found) == (total is not None)
            if total is not None:
                whole = total.to(found[member].dtype)  # small whole numbers: exact in every type
                assert found[member].shape == tensor.shape
                assert torch.equal(found[member], whole * (1 / sum(weights)))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([None, 4, 100, 1000]))
def test_every_element_is_in_one_piece_and_none_overlap(sizes: list[int], piece_bytes: int | None) -> None:
    layout = BucketLayout([torch.zeros(size) for size in sizes], [], 3, piece_bytes)
    assert sorted(member for bucket in layout.buckets for member in bucket.members) == list(range(len(sizes)))
    for bucket in layout.buckets:
        header, end, place = layout.header.length(len(bucket.members)), 0, 0
        for piece in bucket.pieces:
            assert (piece.start, piece.offset) == (place, end)
            place, end = piece.stop, piece.offset + piece.stop - piece.start + header
        assert place == bucket.elements and end == bucket.length
        assert [piece.is_last for piece in bucket.pieces] == [False] * (len(bucket.pieces) - 1) + [True]
        if piece_bytes is not None:
            most = max(1, piece_bytes // 4)
            assert all(piece.stop - piece.start <= most + most // 4 + 1 for piece in bucket.pieces)


def test_a_bias_travels_with_the_weight_beside_it() -> None:
    shapes = [(100,), (100, 100), (100,), (100, 100), (100,), (10, 100), (10,)]
    layout = BucketLayout([torch.zeros(shape) for shape in shapes], [], 2, piece_bytes=8_000)
    assert [bucket.members for bucket in layout.buckets] == [(6, 5, 4), (3,), (2, 1), (0,)]
    assert [len(bucket.pieces) for bucket in layout.buckets] == [1, 4, 5, 1]


def test_how_much_travels_at_once_follows_from_sizes_and_shared_cores() -> None:
    parameters = [torch.zeros(1 << 22)]
    assert piece_bytes_for(parameters, 8) == (1 << 24) // 8
    assert piece_bytes_for(parameters, 1) == 1 << 24
    assert piece_bytes_for([torch.zeros(10)], 8) == 1 << 20  # an all-reduce has a price, whatever its size
    assert piece_bytes_for(parameters, 8, share_cores=True) == 25 << 20
    many = [torch.zeros(1 << 22)] * 20
    assert piece_bytes_for(many, 8, share_cores=True) == 20 * (1 << 24) // 8


def test_processes_share_cores_if_they_share_a_loopback_interface_and_compute_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = process_group.ProcessGroup.__new__(process_group.ProcessGroup)
    processes._device = torch.device("cpu")
    monkeypatch.setattr(processes, "gather_bytes", lambda own: [own, own])
    assert processes.share_cores()
    monkeypatch.setattr(processes, "gather_bytes", lambda own: [own, b"another boot, another network"])
    assert not processes.share_cores()
    processes._device = torch.device("cuda")
    monkeypatch.setattr(processes, "gather_bytes", lambda own: [own, own])
    assert not processes.share_cores()


@pytest.mark.parametrize("says", ["", "nonsense", "1 2", "7 500000000 3"])
def test_contention_is_measured_whatever_the_system_says_of_its_threads(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter stands still here, so nobody waited for a core; without one, that is what is assumed."""
    (tmp_path / "1").mkdir()
    if says:
        (tmp_path / "1" / "schedstat").write_text(says)
    monkeypatch.setattr(process_group, "_TASKS", tmp_path)
    assert process_group.contention(lambda tensor: None, 3, torch.device("cpu")) == 0.0


def test_waiting_for_a_core_is_contention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    waited_ns = 0

    def allreduce(tensor: Tensor) -> None:
        nonlocal waited_ns
        waited_ns += 10**12
        for thread in "12":
            (tmp_path / thread / "schedstat").write_text(f"5 {waited_ns} 3")

    monkeypatch.setattr(process_group, "_TASKS", tmp_path)
    assert process_group.contention(allreduce, 1, torch.device("cpu")) == 1.0


def test_a_gradient_accumulated_in_place_is_weighed_once() -> None:
    layout = BucketLayout([torch.zeros(4)], [], 1, None)
    slot = RoundBuffers(layout)
    slot.fill(0, torch.ones(4), 1.0)
    inside = slot.average(layout.buckets[0], 1.0)[0]
    slot.fill(0, inside, 3.0)
    assert inside.tolist() == [3.0] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_slot_sees_what_is_not_finite(bad: float) -> None:
    layout = BucketLayout([torch.zeros(50), torch.zeros(3, 3)], [], 2, 40)
    slot = RoundBuffers(layout)
    slot.fill(0, torch.ones(50), 1.0)
    assert slot.is_finite()
    slot.fill(1, torch.full((3, 3), bad), 1.0)
    assert not slot.is_finite()


# ------------------------------------------------------------ order


def _exchanged(
    layout: BucketLayout, readiness: list[list[int]], seed: int, before: list[int | None] | None = None
) -> list[list[tuple[int, int]]]:
    """By worker, the pieces in the order in which it let them go; buckets become ready in the orders given."""
    gathering = Gathering(len(readiness), seed=seed, most_s=0.002)
    orders: list[list[tuple[int, int]]] = [[] for _ in readiness]
    threads = []
    for worker, ready in enumerate(readiness):
        round = Round(0, RoundBuffers(layout), layout, worker, 1.0)
        changed = threading.Condition()
        plane: Any = SimpleNamespace(_group=gathering.of(worker), before_complete=lambda: None, changed=changed)

        def wait_for(holds: Callable[[], object], changed: threading.Condition = changed) -> None:
            with changed:
                assert changed.wait_for(holds, 30)

        def leave(piece: Any, ready: list[bool], worker: int = worker, round: Round = round) -> Tensor:
            orders[worker].append((piece.bucket, piece.start))
            return Round.leave(round, piece, ready)

        def fill(ready: list[int] = ready, round: Round = round, worker: int = worker, plane: Any = plane) -> None:
            draw = random.Random(seed + worker)
            for bucket in ready:
                time.sleep(draw.random() * 0.003)  # a backward pass, faster or slower
                for member in layout.buckets[bucket].members:
                    round.fill(member, None)
                with plane.changed:
                    plane.changed.notify_all()

        plane.wait_for, round.leave = wait_for, leave  # type: ignore[method-assign]
        plane._land = lambda round, piece, work, plane=plane: Plane._land(plane, round, piece, work)
        order = PieceOrder(layout.buckets, layout.urgency, before)
        threads += [
            threading.Thread(target=fill),
            threading.Thread(target=Plane._exchange, args=(plane, round, order)),
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return orders


@given(data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_all_workers_choose_the_same_order_whatever_comes_when(data: Any, seed: int) -> None:
    sizes = data.draw(st.lists(st.integers(11, 60), min_size=4, max_size=10))
    layout = BucketLayout([torch.zeros(size) for size in sizes], [], 3, 80)
    numbers = [bucket.number for bucket in layout.buckets]
    places = st.lists(st.none() | st.integers(0, 12), min_size=len(numbers), max_size=len(numbers))
    before = data.draw(st.none() | places, label="when they were ready in the round before")
    orders = _exchanged(layout, [data.draw(st.permutations(numbers)) for _ in range(3)], seed, before)
    assert orders[0] == orders[1] == orders[2]
    pieces = [(piece.bucket, piece.start) for bucket in layout.buckets for piece in bucket.pieces]
    assert sorted(orders[0]) == sorted(pieces)


def test_what_all_have_ready_goes_by_urgency_and_otherwise_in_the_order_of_backward() -> None:
    layout = BucketLayout([torch.zeros(10) for _ in range(5)], [], 2, 40)  # bucket 0 holds the last parameter
    order = PieceOrder(layout.buckets, layout.urgency)
    assert order.next().bucket == 0  # nothing is known yet
    order.heard([0, 0, 1, 0, 1])
    assert order.next().bucket == 3  # bucket 4 is more urgent, but one is not ready with it
    order.heard([0, 0, 0, 0, 0])
    assert [order.next().bucket for _ in range(3)] == [4, 2, 1]
    assert order.left == 0


# ------------------------------------------------------------ partial steps

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, weight_decay=0.1),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=2),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_stepped_by_buckets_makes_the_step_of_the_whole(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    shapes = [(4, 3), (3,), (5, 4), (), (2, 2, 3), (6,)]

    def made() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        values = torch.Generator().manual_seed(1)
        parameters = [nn.Parameter(torch.randn(shape, generator=values)) for shape in shapes]
        groups = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.03}]
        return parameters, _OPTIMIZERS[name](groups)

    whole, plain_optimizer = made()
    parts, ours = made()
    steps = PartialSteps(ours)
    for iteration in range(6):
        gradients = [torch.randn(shape, generator=draw) for shape in shapes]
        for number, parameter in enumerate(whole):
            parameter.grad = None if (iteration, number) == (2, 1) else gradients[number].clone()
        plain_optimizer.step()
        hyper = steps.hyper()
        for group in ours.param_groups:
            group["lr"] = group["lr"] * 0 - 1.0  # changed after step(): must not be seen
        for bucket in ([5, 0], [3], [1, 2, 4]):
            given = {parts[number]: gradients[number].clone() for number in bucket if (iteration, number) != (2, 1)}
            steps.apply(given, hyper)
        for group, known in zip(ours.param_groups, hyper, strict=True):
            group["lr"] = known["lr"]
        assert all(parameter.grad is None for parameter in parts)
        for one, other in zip(whole, parts, strict=True):
            assert torch.equal(one, other)
    # Where there is no state, ours may hold an empty entry for a parameter.
    states = [
        {number: state for number, state in optimizer.state_dict()["state"].items() if state}
        for optimizer in (plain_optimizer, ours)
    ]
    assert states[0].keys() == states[1].keys()
    for number in states[0]:
        for key, value in states[0][number].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][key])), key


def test_a_step_can_be_made_on_a_copy_with_the_same_state() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    steps, shadow = PartialSteps(optimizer), {parameter: parameter.detach().clone()}
    steps.apply({parameter: torch.ones(3)}, steps.hyper(), shadow)
    steps.apply({parameter: torch.ones(3)}, steps.hyper(), shadow)
    assert parameter.tolist() == [1.0] * 3
    assert shadow[parameter].tolist() == [1 - 1 - 1.5] * 3
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.5] * 3


def test_a_parameter_whose_memory_was_replaced_is_updated_where_it_is_now() -> None:
    parameter = nn.Parameter(torch.ones(3))
    steps = PartialSteps(torch.optim.SGD([parameter], lr=1.0))
    steps.apply({parameter: torch.ones(3)}, steps.hyper())
    parameter.data = torch.full((3,), 5.0)
    steps.apply({parameter: torch.ones(3)}, steps.hyper())
    assert parameter.tolist() == [4.0] * 3


# ------------------------------------------------------------ seconds


def test_a_stopwatch_takes_apart_data_computing_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("quorate.data_parallel.iterations.time.monotonic", lambda: now[0])
    watch = Stopwatch()
    now[0] = 102.0
    watch.begin(10.0)
    now[0] = 103.0
    watch.begin(10.5)  # the second forward of an accumulation does not begin anew
    now[0] = 107.0
    assert watch.end(11.0) == {"data_s": 2.0, "compute_s": 4.0, "transfer_s": 1.0}
    watch.restart()
    now[0] = 108.0
    assert watch.end(11.0) == {"data_s": 1.0, "compute_s": 0.0, "transfer_s": 0.0}  # a step without a forward
