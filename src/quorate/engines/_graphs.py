"""CUDA graphs: some hundred calls as one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WARM_UPS = 3


class Recording(NamedTuple):
    """A graph, and what its calls gave, which every replay writes anew.

    held: what the calls read in memory that is not theirs, and that must not be freed while there is the graph.
    """

    graph: torch.cuda.CUDAGraph
    made: Tensor
    held: Any


def record(
    compute: Callable[[], Tensor], clear: Callable[[], None], hold: Callable[[], Any], device: torch.device
) -> Recording:
    """The calls of `compute`; `clear` goes between them. Raises whatever torch says where they cannot be recorded.

    Libraries set themselves up in their first calls, which cannot be.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        try:
            _warm_up(compute, clear)
            held, graph = hold(), torch.cuda.CUDAGraph()
            with _no_rubbish_collected(), torch.cuda.graph(graph):
                made = compute()
        except Exception:
            torch.cuda.synchronize()
            torch.cuda.set_stream(stream)  # torch leaves its own where recording fails
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # it still believes that it is being recorded
            raise
    return Recording(graph, made, held)


def _warm_up(compute: Callable[[], Tensor], clear: Callable[[], None]) -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            compute()
            clear()
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def _no_rubbish_collected() -> Iterator[None]:
    """A graph of an earlier run that were freed while another is recorded would spoil that one."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
