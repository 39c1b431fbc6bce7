"""The base class of policies: a pure state machine, events in, actions out.

Standard library only: no torch, no clock, no input or output. Time comes with the events. The constructor's arguments
are attributes that never change; all other attributes are state, which `reset` makes and which can be saved and
restored as JSON values at any moment between two events. docs/extending.md shows how to write a policy.
"""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from inspect import signature
from typing import Any, ClassVar, NamedTuple, Self

from quorate.errors import BadInput
from quorate.events import (
    Action,
    Apply,
    Arrived,
    Cancel,
    Choose,
    Drop,
    Event,
    Exhausted,
    Learned,
    Pinned,
    Refused,
    SetTimer,
    Start,
    Ticket,
    Timer,
    Withdrawn,
    WorkerJoined,
    WorkerLost,
)

_ACTIONS = {kind.__name__: kind for kind in (Start, Apply, Drop, Cancel, SetTimer, Choose)}


def pack(value: Any) -> Any:
    """A policy's attribute as JSON values: numbers, tickets, and lists, deques and dicts of these."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Ticket):
        return {"ticket": list(value)}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple | set):
        return {type(value).__name__: [pack(item) for item in value]}
    if isinstance(value, deque):
        return {"deque": [pack(item) for item in value], "maxlen": value.maxlen}
    if isinstance(value, dict):  # pairs, since JSON keys are text and the order is part of the state
        return {"pairs": [[pack(key), pack(item)] for key, item in value.items()]}
    raise TypeError(
        f"a {type(value).__name__} is neither a number, a text or a ticket, nor a list, set or dict of those"
    )


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if "ticket" in value:
            return Ticket(*value["ticket"])
        if "tuple" in value or "set" in value:
            (kind, items), *_ = value.items()
            return {"tuple": tuple, "set": set}[kind](unpack(item) for item in items)
        if "deque" in value:
            return deque((unpack(item) for item in value["deque"]), maxlen=value["maxlen"])
        return {unpack(key): unpack(item) for key, item in value["pairs"]}
    return value


def pack_action(action: Action) -> list[Any]:
    """An action as JSON values."""
    return [type(action).__name__, [pack(value) for value in action]]


def unpack_action(packed: list[Any]) -> Action:
    """The inverse of `pack_action`."""
    kind, values = packed
    return _ACTIONS[kind](*[unpack(value) for value in values])


LATE_WORK = ("cancel", "finish")


class Flag(NamedTuple):
    """The command-line option of one argument of a policy."""

    help: str
    metavar: str = "N"
    default: str | None = None  # shown for None; without it, the argument's own default is shown


LATE_FLAG = Flag("Late work: cancel it, or let it finish and drop it.", "|".join(LATE_WORK))
QUORUM_FLAG = Flag("Gradients that make an update.", default="the N of N+b")


def _flags_in(kind: type) -> dict[str, Flag]:
    """The flags that a class itself defines. An attribute of that name in a user's class may be another thing."""
    own = vars(kind).get("flags")
    return {name: flag for name, flag in own.items() if isinstance(flag, Flag)} if isinstance(own, dict) else {}


class Policy(ABC):
    """Decides which gradients make the next version."""

    #: Its name in traces, tables and on the command line; by default, FirstTwo is called first-two.
    name: ClassVar[str] = "policy"
    #: How many versions before the newest a `Start` may ask for.
    history: int = 0
    #: Whether it hears `Learned`.
    wants_noise: ClassVar[bool] = False
    #: What it does with gradients of a closed version; synchronous policies have an argument of this name.
    late: str = "cancel"
    #: Whether its `Apply` may carry weights.
    weighs: bool = False
    #: Whether workers start together on a version, so that a trace has rounds.
    has_rounds: ClassVar[bool] = False
    #: Whether all updates but the last of an epoch are made of `per_update` gradients.
    steady: ClassVar[bool] = False
    #: Whether DataParallel can run it: an update takes gradients of the newest version, at most one of each worker.
    collective: ClassVar[bool] = False
    #: Whether each update takes a gradient of every worker, so that DataParallel needs no coordinator. Never inherited.
    takes_everybody: ClassVar[bool] = False
    #: Options of the command line, by argument, for the policies that come with quorate.
    flags: ClassVar[dict[str, Flag]] = {}
    #: Its colour in all figures, from the palette of Okabe and Ito, which colour-blind readers can tell apart.
    #: A user's policy is black.
    colour: ClassVar[str] = "#000000"
    #: Why a plan does not recommend this policy even if its simulated time is the shortest.
    drawback: ClassVar[str | None] = None
    #: `file.py:Class` and the absolute path of that file, if the class was loaded by its place.
    source: ClassVar[tuple[str, str | None] | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        cls.name = own.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
        cls.takes_everybody, cls.source = own.get("takes_everybody", False), None
        cls.flags = {name: flag for kind in reversed(cls.__mro__) for name, flag in _flags_in(kind).items()}

    # ------------------------------------------------------------ configuration

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        """Names of the constructor's arguments, which are also attributes; traces record them."""
        return tuple(signature(cls).parameters)

    @classmethod
    def from_workers(cls, quorum: int, backups: int) -> dict[str, Any]:
        """The arguments that `--workers N+b` stands for."""
        return {name: value for name, value in (("quorum", quorum), ("backups", backups)) if name in cls.parameters()}

    def begin(self, workers: int) -> Self:
        """A fresh copy, ready for a run with this many workers. The original is never changed."""
        self.check(workers)
        fresh = copy.deepcopy(self)
        fresh.reset(workers)
        for name, value in self.options().items():
            if getattr(fresh, name) != value:
                raise BadInput(f"policy {self.name!r}: reset() changes {name!r}, an argument of __init__; rename one")
        return fresh

    @classmethod
    def waits_for_all(cls) -> bool:
        """Whether every round waits for all workers, so that the time of each arrival is seen."""
        return cls.has_rounds and cls.takes_everybody

    def delay_at(self, iteration: int) -> int:
        """How many versions back the gradients of this iteration are computed, if `takes_everybody`.

        The delay grows by at most one an iteration, so a later iteration never reads an earlier version.
        """
        return 0

    @property
    def workers_named(self) -> int | None:
        """The number of workers that its arguments ask for; None: any number."""
        return None

    def check(self, workers: int) -> None:
        """Refuse a configuration that this many workers cannot run."""
        if workers < 1:
            raise BadInput(f"workers is {workers}, but a run needs at least 1 worker")

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, as they were given."""
        for name in self.parameters():
            if not hasattr(self, name):
                raise BadInput(f"policy {self.name!r} has no attribute {name!r}; write self.{name} = … in its __init__")
        return {name: getattr(self, name) for name in self.parameters()}

    def describe(self) -> dict[str, Any]:
        """The policy in a trace's header: name, arguments, and the place of the class if it is not quorate's."""
        described = {"name": self.name, **self.options()}
        try:
            json.dumps(described)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"policy {self!r} cannot be recorded ({error}); its arguments must be numbers, texts, lists or dicts"
            ) from None
        kind = type(self)
        if kind.__module__.startswith(__package__ + "."):
            return described
        text, file = kind.source or (f"{kind.__module__}:{kind.__qualname__}", None)
        return {**described, "source": text, "source_file": file}

    def header(self, workers: int) -> dict[str, Any]:
        """The policy's part of a trace's header; it makes readers independent of the policy's class."""
        per_update = self.begin(workers).per_update if self.steady else None
        return {"policy": self.describe(), "per_update": per_update, "rounds": self.has_rounds}

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
        """The number of arrivals that make a version (fewer at the end of an epoch); known after `begin`."""

    @property
    @abstractmethod
    def needed(self) -> int:
        """The number of live workers that it takes to make the next version."""

    # ------------------------------------------------------------ the state machine

    def handle(self, event: Event) -> Iterable[Action]:
        """Decide on one event. The actions are carried out in their order, before the next event."""
        kind = type(event)
        if kind is Arrived:
            return self.arrived(event.time, event.ticket)  # type: ignore[union-attr]
        if kind is Exhausted:
            return self.exhausted(event.time, event.worker)  # type: ignore[union-attr]
        if kind is WorkerJoined:
            return self.joined(event.time, event.worker)  # type: ignore[union-attr]
        if kind is WorkerLost:
            return self.lost(event.time, event.worker, event.tickets)  # type: ignore[union-attr]
        if kind is Timer:
            return self.timer(event.time, event.key)  # type: ignore[union-attr]
        if kind is Refused:
            return self.refused(event.time, event.ticket)  # type: ignore[union-attr]
        if kind is Learned:
            return self.learned(event.noise_scale)  # type: ignore[union-attr]
        if kind is Withdrawn:
            return self.withdrawn(event.time, event.ticket)  # type: ignore[union-attr]
        assert kind is Pinned
        return self.pinned(event.ticket)  # type: ignore[union-attr]

    @abstractmethod
    def reset(self, workers: int) -> None:
        """Set every attribute that the hooks below change to its value at the start of a run."""

    @abstractmethod
    def arrived(self, time: float, ticket: Ticket) -> Iterable[Action]:
        """A gradient has arrived."""

    @abstractmethod
    def refused(self, time: float, ticket: Ticket) -> Iterable[Action]:
        """A gradient held NaN or Inf; its worker is free."""

    @abstractmethod
    def joined(self, time: float, worker: int) -> Iterable[Action]:
        """A worker has joined, and is free."""

    @abstractmethod
    def lost(self, time: float, worker: int, tickets: tuple[int, ...]) -> Iterable[Action]:
        """A worker is gone, with these tickets: the one that it computed, and gradients that only it had."""

    @abstractmethod
    def exhausted(self, time: float, worker: int) -> Iterable[Action]:
        """A `Start` found no batch left in the epoch; the worker is free."""

    def timer(self, time: float, key: int) -> Iterable[Action]:
        raise AssertionError(f"{self.name} sets no timers")

    def learned(self, noise_scale: float) -> Iterable[Action]:
        raise AssertionError(f"{self.name} does not want the noise scale")

    def withdrawn(self, time: float, ticket: Ticket) -> Iterable[Action]:
        """The gradient of an arrived ticket is taken back, and its worker is free: as if it were lost and joined."""
        return [*self.lost(time, ticket.worker, (ticket.id,)), *self.joined(time, ticket.worker)]

    @abstractmethod
    def pinned(self, ticket: Ticket) -> Iterable[Action]:
        """The ticket just started holds a batch that was dropped too often: the update must wait for it."""

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """All attributes that are state, as JSON values."""
        arguments = self.parameters()
        return {key: self._packed(key, value) for key, value in vars(self).items() if key not in arguments}

    def _packed(self, key: str, value: Any) -> Any:
        try:
            return pack(value)
        except TypeError as error:
            raise BadInput(f"policy {self.name!r} keeps {key!r}, which no checkpoint can hold: {error}") from None

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` gave."""
        missing = next((key for key in self.state() if key not in state), None)
        if missing is not None:
            raise BadInput(
                f"the checkpoint does not say {missing!r} of policy {self.name!r}; the policy has changed since"
            )
        for key, value in state.items():
            setattr(self, key, unpack(value))


def check_late(late: str) -> str:
    """Check `late`: late work is cancelled at once, or left to finish and then dropped, as in the paper."""
    if late not in LATE_WORK:
        raise BadInput(f"late is {late!r}, but late work can be one of: {', '.join(LATE_WORK)}")
    return late


def check_quorum(quorum: int, workers: int) -> None:
    """Refuse a quorum that the workers can never reach."""
    if quorum > workers:
        raise BadInput(
            f"quorum is {quorum}, but the run has {workers} workers: "
            f"a quorum above the workers is never reached; lower it or add workers"
        )


def without(tickets: list[Ticket], gone: tuple[int, ...]) -> list[Ticket]:
    """The tickets whose gradient is not gone with its worker."""
    return [ticket for ticket in tickets if ticket.id not in gone]


def choose(arrivals: list[Ticket], quorum: int, must: dict[int, None]) -> tuple[list[Ticket], list[Action]]:
    """Exactly `quorum` arrivals, pinned ones (`must`) first, then the earliest; and drops of the surplus."""
    if len(arrivals) <= quorum:
        return arrivals, []
    keep = {ticket.id for ticket in sorted(arrivals, key=lambda ticket: ticket.id not in must)[:quorum]}
    surplus: list[Action] = [
        Drop(ticket, "surplus: the quorum was full") for ticket in arrivals if ticket.id not in keep
    ]
    return [ticket for ticket in arrivals if ticket.id in keep], surplus
