"""CUDA events that order the work of threads on a GPU, where a call returns when its work is only queued.

On a CPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

#: A point in a stream's queue that another stream can wait for; None on a CPU.
Event: TypeAlias = Any


def record_event(device: torch.device) -> Event:
    """An event after all work that this thread has queued so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_event(event: Event) -> None:
    """Queue this thread's later work behind the event."""
    if event is not None:
        event.wait()


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has done the queued work of all threads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give this thread a stream of its own, so that its work does not queue behind that of other threads."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
