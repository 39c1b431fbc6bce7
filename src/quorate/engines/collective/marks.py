"""Order between threads on a GPU, whose work is only queued when a call returns. On a CPU there is nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

#: A point in a stream's work that another stream can wait for; None on a CPU.
Mark: TypeAlias = Any


def mark(device: torch.device) -> Mark:
    """Everything queued so far by this thread."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(point: Mark) -> None:
    """Whatever this thread queues from now on comes after the point."""
    if point is not None:
        point.wait()


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """This thread's work does not queue behind that of others."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
