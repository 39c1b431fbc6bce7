"""A task comes to a worker as it was: its tensors shared, but what one worker changes is its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import quorate
from quorate.engines.local import worker
from quorate.engines.shared.shared_memory import anonymous_file
from quorate.engines.shared.task_transfer import read_description, read_task, write_job
from quorate.task import BoundTask
from tests.engines.local.tasks import Mark
from tests.toy_tasks import Toy

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
DTYPES += [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]


class Sent:
    """A task in an anonymous file, as the main process leaves it for its workers."""

    def __init__(self, **things: Any) -> None:
        self.descriptor = anonymous_file("test")
        task = Toy()
        for name, thing in things.items():
            setattr(task, name, thing)
        write_job(self.descriptor, BoundTask(task, 8), {"batch_size": 8})

    def received(self) -> Any:
        """As one worker gets it."""
        return read_task(self.descriptor, read_description(self.descriptor)).task

    def close(self) -> None:
        os.close(self.descriptor)


@pytest.fixture
def send() -> Iterator[Any]:
    made: list[Sent] = []

    def make(**things: Any) -> Sent:
        made.append(Sent(**things))
        return made[-1]

    yield make
    for sent in made:
        sent.close()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Views of all kinds, of random bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = max(1, torch.Size(shape).numel()) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=random)
    tensor = data.view(dtype)[: torch.Size(shape).numel()].reshape(shape)
    return draw(
        st.sampled_from(
            [
                tensor,
                tensor.transpose(0, -1),
                tensor[1:],
                tensor[::2],
                tensor.flatten()[1:],
                tensor.expand(3, *tensor.shape),
                tensor.reshape(-1)[:0],
                tensor.reshape(-1)[0] if tensor.numel() else tensor,
            ]
        )
    )


def bits(tensor: Tensor) -> list[int]:
    plain = tensor.contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist()


@given(things=st.lists(tensors(), max_size=5))
def test_any_tensor_comes_as_it_was(things: list[Tensor]) -> None:
    sent = Sent(things=things, nested={"a": (things, 3)}, text="x" * len(things) * 7)
    try:
        got = sent.received()
        for mine, theirs in zip([*things, *things], [*got.things, *got.nested["a"][0]], strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.stride() == theirs.stride()
            assert bits(mine) == bits(theirs)
    finally:
        sent.close()


def test_tensors_that_share_memory_share_it_there_too(send: Any) -> None:
    whole = torch.arange(1000.0)
    sent = send(
        whole=whole, row=whole.view(10, 100)[3], again=whole, bytes=whole.view(torch.uint8), other=whole.clone()
    )
    one, other = sent.received(), sent.received()
    one.row.fill_(-1)
    assert torch.equal(one.whole[300:400], torch.full((100,), -1.0)) and torch.equal(one.again, one.whole)
    assert one.bytes.view(torch.float32)[399] == -1
    assert torch.equal(one.other, whole), "a copy is a copy"
    assert torch.equal(other.whole, whole) and torch.equal(sent.received().whole, whole), "what one changes is its own"
    assert os.fstat(sent.descriptor).st_size < 3 * 4000 + 20_000, "memory that is shared is sent once"


def test_other_things_of_torch_come_too(send: Any) -> None:
    parameter = nn.Parameter(torch.ones(3))
    leaf = torch.ones(3, requires_grad=True)
    things = {
        "parameter": parameter,
        "leaf": leaf,
        "sparse": torch.eye(3).to_sparse(),
        "module": nn.Linear(3, 2),
        "generator_state": torch.Generator().manual_seed(7).get_state(),
        "dtype": torch.bfloat16,
    }
    got = send(**things).received()
    assert type(got.parameter) is nn.Parameter and got.leaf.requires_grad and got.leaf.is_leaf
    assert torch.equal(got.sparse.to_dense(), torch.eye(3)) and got.dtype is torch.bfloat16
    torch._utils._sparse_tensors_to_validate.clear()  # torch keeps those that it was not asked to load
    assert torch.equal(got.module.weight, things["module"].weight)


@pytest.mark.parametrize("view", [Tensor.conj, lambda z: z.conj().imag])
def test_conjugate_views_come_as_they_were(send: Any, view: Any) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    came = send(z=view(z)).received().z.tolist()
    assert came == view(z).tolist()


# ------------------------------------------------------------ in real workers


class Vandal(Toy):
    """Spoils its data after every loss; each worker must find them as they were when it began."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.notes = torch.zeros(3)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if worker.in_worker_process:
            mine = Path(self.folder) / str(os.getpid())
            seen = Mark(mine).make()
            assert bool(self.notes[0] == 0) == seen, "another worker's change is seen here"
            self.notes.fill_(1)
        return super().loss(model, batch)


@pytest.mark.usefixtures("warm")
def test_what_a_worker_changes_others_do_not_see(tmp_path: Path) -> None:
    task = Vandal(str(tmp_path))
    quorate.train(task, quorate.FullSync(), quorate.Local(3), epochs=1)
    assert len(list(tmp_path.iterdir())) == 3
    assert task.notes.tolist() == [0, 0, 0]
