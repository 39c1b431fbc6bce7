"""What the driver knows of a worker, and what it waits for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quorate.engines.processes import messages
from quorate.engines.processes.live import Order
from quorate.engines.ray.worker import Ready


@dataclass
class Seat:
    """A worker, through all its lives."""

    number: int
    actor: Any = None
    ready: Ready | None = None
    orders: deque[Order] = field(default_factory=deque)  # not yet answered, oldest first
    held: Order | None = None  # not sent yet, since the worker has not even noticed that two others are over
    on_their_way: list[Order] = field(default_factory=list)  # answered; the gradient is not at its shards yet
    life: Any = None  # a reference that is ready when the worker is gone
    waiting_since: float = 0.0  # since when the oldest order could have been answered
    ping: Any = None
    ping_since: float = 0.0
    has_answered: bool = False  # in this life
    failures: int = 0  # in a row
    told: messages.Failed | None = None
    leaves: bool = False  # its node has announced its end
    cut: Any = None  # what it knows of the shards
    nodes_at_start: set[str] = field(default_factory=set)  # of this life


class Pending(NamedTuple):
    """What a reference is waited for."""

    kind: str  # "ready", "answer" or "taken"
    seat: Seat
    order: Order | None = None
