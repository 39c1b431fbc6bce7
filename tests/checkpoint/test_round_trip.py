"""A state that can be saved is restored exactly; any other state is refused, and the error names the value."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from quorate.checkpoint import CHECKPOINTS, CheckpointFolder, check_can_save, check_same_tensors
from quorate.errors import BadInput
from tests.checkpoint.states import FILES, same, short_lived

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool),
    *(torch.complex64, torch.complex128),
]
VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    lambda tensor: tensor[1:] if tensor.dim() else tensor,
    lambda tensor: tensor[::2] if tensor.dim() else tensor,
    lambda tensor: tensor.expand(3, *tensor.shape),
    lambda tensor: tensor.conj(),
    lambda tensor: tensor.requires_grad_() if tensor.dtype in (torch.float32, torch.complex64) else tensor,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random bits of any type, so that NaN, infinity and subnormal numbers are among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    highest = 2 if dtype == torch.bool else 256
    content = torch.randint(0, highest, (count,), dtype=torch.uint8, generator=random)
    return draw(st.sampled_from(VIEWS))(content.view(dtype).reshape(shape))


anything_unicode = st.text(st.characters(exclude_categories=()))
keys = anything_unicode | st.integers()
leaves = st.none() | st.booleans() | st.integers() | st.floats() | anything_unicode | tensors()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@given(state=st.dictionaries(keys, values))
@example(state={})
@example(state={"odd strides": [torch.ones(size, dtype=torch.complex64)[::2] for size in (0, 2, 4)]})
@example(state={"huge": 10**5000, 10**5000: -(2**64), "half a pair": "\ud83d\ude00", "zero": -0.0})
@example(
    state={"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "__metadata__": torch.ones(2), "\udcff": torch.ones(3)}
)
@example(state={"pairs": [["tensor", "0 a"]], "tensor": {"int": "0x1", "float": "nan", "tuple": [1]}})
def test_every_state_comes_back_equal(state: dict[str, Any]) -> None:
    with short_lived() as run:
        folder = CheckpointFolder(run)
        check_can_save(state)
        assert folder.save(7, state) == run / CHECKPOINTS / "00000007"
        loaded = folder.load()
        assert (loaded.version, loaded.damaged) == (7, ())
        assert same(loaded.state, state)
        for file in FILES[1:]:
            text = (folder.folder / "00000007" / file).read_bytes().decode("utf-8", "surrogatepass")
            json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    state = {
        "whole": whole,
        "again": whole,
        "rows": list(whole.view(3, 4)),
        "complex": torch.view_as_complex(whole.view(6, 2)),
    }
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state)
    back = folder.load().state
    assert same(back, state)
    back["whole"].zero_()
    assert back["again"].sum() == back["rows"][0].sum() + back["rows"][1].sum() + back["rows"][2].sum() == 66


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_in_main_memory(tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3).t()}
    CheckpointFolder(tmp_path).save(1, {"weight": state["weight"].cuda()})
    assert same(CheckpointFolder(tmp_path).load().state, state)


class Pair(NamedTuple):
    one: int


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: 0, "function"),
        ({1}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (deque([1]), "deque"),
        (Pair(1), "Pair"),
        (Counter([1]), "Counter"),
        (OrderedDict(), "OrderedDict"),
        (torch.float32, "dtype"),
        (nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.eye(2).to_sparse(), "Tensor of the kind sparse_coo"),
        (torch.empty(2, device="meta"), "Tensor of the kind meta"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place(tmp_path: Path, value: object, kind: str) -> None:
    state = {"learner": {"groups": [0, ({7: {"lambda": value}},)]}}
    sentence = f"learner.groups[1][0].7.lambda is a {kind}; it cannot be saved in a checkpoint, which holds dicts,"
    for attempt in (check_can_save, lambda state: CheckpointFolder(tmp_path).save(1, state)):
        with pytest.raises(BadInput) as refused:
            attempt(state)
        assert str(refused.value).startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_keys_and_shapes_that_cannot_be_saved() -> None:
    with pytest.raises(BadInput, match=r"^a\.b has the key True, a bool; it cannot be saved"):
        check_can_save({"a": {"b": {True: 1}}})
    with pytest.raises(BadInput, match=r"^the state has the key \(1, 2\), a tuple; it cannot"):
        check_can_save({(1, 2): 1})  # type: ignore[dict-item]
    with pytest.raises(BadInput, match="is a list, but it must be a dict"):
        check_can_save([])  # type: ignore[arg-type]
    endless: dict[str, Any] = {}
    endless["again"] = [endless, endless]
    with pytest.raises(BadInput, match=r"^again\[0\]\.again.* is nested deeper than 100 levels"):
        check_can_save(endless)
    with pytest.raises(BadInput, match="version is -1, but it must be at least 0"):
        CheckpointFolder(Path("nowhere")).save(-1, {})


def test_the_first_tensor_that_differs_is_named() -> None:
    here = {"0.weight": torch.zeros(32, 6), "0.bias": torch.zeros(32)}
    check_same_tensors(here, {name: tensor + 1 for name, tensor in here.items()}, "model")

    def sentence(**changes: Tensor | None) -> str:
        there = {name: changes.get(name[2:], tensor) for name, tensor in here.items()}
        there |= {name: tensor for name, tensor in changes.items() if name == "more"}
        with pytest.raises(BadInput) as refused:
            check_same_tensors(here, {name: tensor for name, tensor in there.items() if tensor is not None}, "model")
        return str(refused.value).removeprefix("the checkpoint is of another model: tensor ")

    assert sentence(weight=torch.zeros(16, 6), bias=None) == "'0.weight' has shape (16, 6) there, (32, 6) here"
    assert sentence(bias=torch.zeros(32).double()) == "'0.bias' has type torch.float64 there, torch.float32 here"
    assert sentence(bias=None) == "'0.bias' is missing there"
    assert sentence(more=torch.zeros(1)) == "'more' is there, but not here"
