"""What every policy is: a pure state machine, events in, actions out.

Standard library only: no torch, no clock, no input or output. Time comes with the events. Configuration is
public and never changes; state is private (leading underscore), is made by `begin` and can be saved and
restored as JSON values at any moment between two events.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from quorate.errors import BadInput
from quorate.events import (
    Action,
    Arrived,
    Drop,
    Event,
    Exhausted,
    Learned,
    Pinned,
    Refused,
    Ticket,
    Timer,
    WorkerJoined,
    WorkerLost,
)
from quorate.policies._state import pack, unpack

LATE_WORK = ("cancel", "finish")


class Policy(ABC):
    """Decides which gradients make the next version."""

    name: ClassVar[str]
    #: Names of the constructor's arguments, which are also attributes: what the trace records.
    parameters: ClassVar[tuple[str, ...]] = ()
    #: How many versions before the newest a `Start` may ask for.
    history: int = 0
    #: Whether it hears `Learned`.
    wants_noise: ClassVar[bool] = False

    # ------------------------------------------------------------ configuration

    def begin(self, workers: int) -> Self:
        """A fresh copy, ready for a run with this many workers. The original is never changed."""
        self.check(workers)
        fresh = copy.copy(self)
        fresh._reset(workers)
        return fresh

    def check(self, workers: int) -> None:
        """Refuse a configuration that this many workers cannot run."""
        if workers < 1:
            raise BadInput(f"workers is {workers}, but a run needs at least 1 worker")

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, as they were given."""
        return {name: getattr(self, name) for name in self.parameters}

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({inside})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.options() == other.options()

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    @abstractmethod
    def staleness_bound(self) -> int | None:
        """No arrival staler than this is ever applied (None: no bound)."""

    @property
    @abstractmethod
    def per_update(self) -> int:
        """How many arrivals make a version (fewer where an epoch ends); known once begun."""

    @property
    @abstractmethod
    def needed(self) -> int:
        """How many live workers it takes to make the next version."""

    # ------------------------------------------------------------ the state machine

    def handle(self, event: Event) -> Iterable[Action]:
        """Decide what follows from one event; the actions are carried out in their order, before the next event."""
        kind = type(event)
        if kind is Arrived:
            return self._arrived(event.time, event.ticket)  # type: ignore[union-attr]
        if kind is Exhausted:
            return self._exhausted(event.time, event.worker)  # type: ignore[union-attr]
        if kind is WorkerJoined:
            return self._joined(event.time, event.worker)  # type: ignore[union-attr]
        if kind is WorkerLost:
            return self._lost(event.time, event.worker, event.tickets)  # type: ignore[union-attr]
        if kind is Timer:
            return self._timer(event.time, event.key)  # type: ignore[union-attr]
        if kind is Refused:
            return self._refused(event.time, event.ticket)  # type: ignore[union-attr]
        if kind is Learned:
            return self._learned(event.noise_scale)  # type: ignore[union-attr]
        assert kind is Pinned
        return self._pinned_started(event.ticket)  # type: ignore[union-attr]

    @abstractmethod
    def _reset(self, workers: int) -> None: ...

    @abstractmethod
    def _arrived(self, time: float, ticket: Ticket) -> Iterable[Action]: ...

    @abstractmethod
    def _refused(self, time: float, ticket: Ticket) -> Iterable[Action]: ...

    @abstractmethod
    def _joined(self, time: float, worker: int) -> Iterable[Action]: ...

    @abstractmethod
    def _lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> Iterable[Action]: ...

    @abstractmethod
    def _exhausted(self, time: float, worker: int) -> Iterable[Action]: ...

    def _timer(self, time: float, key: int) -> Iterable[Action]:
        raise AssertionError(f"{self.name} sets no timers")

    def _learned(self, noise_scale: float) -> Iterable[Action]:
        raise AssertionError(f"{self.name} does not want the noise scale")

    @abstractmethod
    def _pinned_started(self, ticket: Ticket) -> Iterable[Action]: ...

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Everything that `handle` remembers, as JSON values."""
        return {key: pack(value) for key, value in vars(self).items() if key.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` gave."""
        for key, value in state.items():
            setattr(self, key, unpack(value))


def check_late(late: str) -> str:
    """Late work is cancelled at once, or left to finish and then dropped, as in the paper."""
    if late not in LATE_WORK:
        raise BadInput(f"late is {late!r}, but late work can be one of: {', '.join(LATE_WORK)}")
    return late


def without(tickets: list[Ticket], gone: tuple[int, ...]) -> list[Ticket]:
    """The tickets less those whose gradient is gone with its worker."""
    return [ticket for ticket in tickets if ticket.id not in gone]


def choose(arrivals: list[Ticket], quorum: int, must: dict[int, None]) -> tuple[list[Ticket], list[Action]]:
    """Exactly the quorum: pinned ones (`must`) surely, then the earliest; the others are dropped."""
    if len(arrivals) <= quorum:
        return arrivals, []
    keep = {ticket.id for ticket in sorted(arrivals, key=lambda ticket: ticket.id not in must)[:quorum]}
    surplus: list[Action] = [
        Drop(ticket, "surplus: the quorum was full") for ticket in arrivals if ticket.id not in keep
    ]
    return [ticket for ticket in arrivals if ticket.id in keep], surplus
