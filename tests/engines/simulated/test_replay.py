"""A replay of a simulated run computes as the run did, whatever the process that replays it is set to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quorate
from tests.toy_tasks import Toy


class CountsThreads(Toy):
    """Notes how many threads torch has while a gradient is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen.add(torch.get_num_threads())
        return super().loss(model, batch)


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_replay_computes_with_as_many_threads_as_the_run(tmp_path: Path, threads: Any) -> None:
    task, again = CountsThreads(), CountsThreads()
    threads(3)
    result = quorate.train(
        task, quorate.FullSync(), quorate.Simulated(2, "constant:1"), updates=2, out=tmp_path / "run"
    )
    threads(1)
    replay = quorate.replay(tmp_path / "run", again)
    assert (task.seen, again.seen) == ({3}, {3})
    assert replay.result.digest == result.digest
    assert torch.get_num_threads() == 1


def test_without_gradients_the_header_names_no_threads(tmp_path: Path) -> None:
    quorate.train(None, quorate.FullSync(), quorate.Simulated(2, "constant:1"), updates=2, out=tmp_path / "run")
    assert "threads" not in next(iter(quorate.read_trace(tmp_path / "run")))["engine"]
