"""The words of the protocol: events that a policy is told, and actions that it decides.

All input and output of a policy is one of these values. They are plain immutable tuples from the standard
library, because one of each is made for every ticket and because a policy must be testable without torch,
a clock or a process. A policy sees tickets, never tensors.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Ticket(NamedTuple):
    """One piece of work: a worker computes the gradient of one batch at one version of the parameters."""

    id: int
    worker: int
    incarnation: int  # how often this worker had joined before; arrivals of an older incarnation are ignored
    version: int  # version read
    batch: int  # number of the batch in the ledger
    samples: int  # how many samples the batch holds


# ---------------------------------------------------------------- events: what a policy is told


class Parts(NamedTuple):
    """Where the seconds of a finished ticket went."""

    data_s: float  # waiting for its batch
    compute_s: float
    transfer_s: float  # parameters to the worker, gradient from it


class Arrived(NamedTuple):
    """A ticket is finished: the engine has its gradient."""

    time: float
    ticket: Ticket
    parts: Parts | None = None


class Refused(NamedTuple):
    """A ticket is finished but its gradient holds NaN or Inf. It is already dropped; its worker is free."""

    time: float
    ticket: Ticket


class Abandoned(NamedTuple):
    """A worker has noticed that its ticket was cancelled. For the trace alone: the ticket had ended before."""

    time: float
    ticket: Ticket
    cancel_s: float  # seconds since it was cancelled


class WorkerJoined(NamedTuple):
    """A worker has joined and is free: a new one, or one that is back as a new incarnation."""

    time: float
    worker: int


class WorkerLost(NamedTuple):
    """A worker is gone, and with it these tickets: the one it computed, and any gradient that it alone held."""

    time: float
    worker: int
    tickets: tuple[int, ...]


class Timer(NamedTuple):
    """The time set by `SetTimer` with this key has come."""

    time: float
    key: int


class Exhausted(NamedTuple):
    """A `Start` found no batch: the worker stays free. The round closes with the rest of the epoch."""

    time: float
    worker: int


class Pinned(NamedTuple):
    """The batch of a ticket just started was dropped too often to be chance: its round must wait for it."""

    time: float
    ticket: Ticket


class Learned(NamedTuple):
    """An estimate of the gradient noise scale from the last update's norms. Only policies with `wants_noise` get it."""

    time: float
    version: int
    noise_scale: float  # in samples


#: Drop reason for withdrawn tickets; replay matches on it.
WITHDRAWN = "withdrawn: the workers that the round lacks wait for its worker"


class Withdrawn(NamedTuple):
    """An arrived gradient is taken back while its round is open. It is already dropped; its worker is free."""

    time: float
    ticket: Ticket
    reason: str = WITHDRAWN


class Rebound(NamedTuple):
    """The worker turns out to be on another batch than its ticket says: it gets another ticket of the same version.

    No policy hears of it. It happens only where a worker takes its batches ahead of its tickets.
    """

    time: float
    ticket: Ticket


Event: TypeAlias = (
    Arrived
    | Refused
    | Abandoned
    | WorkerJoined
    | WorkerLost
    | Timer
    | Exhausted
    | Pinned
    | Learned
    | Rebound
    | Withdrawn
)


# ---------------------------------------------------------------- actions: what a policy decides


class Start(NamedTuple):
    """Let a free worker compute a gradient at `version`.

    `round` groups the starts that belong to one update (None: no rounds); fresh batches of one round come
    from one epoch.
    """

    worker: int
    version: int
    round: int | None


class Apply(NamedTuple):
    """Make the next version of these arrivals, in this order; `weights` scale gradients (None: all 1)."""

    tickets: tuple[Ticket, ...]
    weights: tuple[float, ...] | None
    reason: str


class Drop(NamedTuple):
    """An arrival will not be used; its batch goes back to the ledger."""

    ticket: Ticket
    reason: str


class Cancel(NamedTuple):
    """Abandon a worker's ticket; its batch goes back to the ledger, and the worker is free.

    It names the worker, since a worker has one ticket at a time and a policy learns a ticket's number only
    when the ticket arrives.
    """

    worker: int
    reason: str


class SetTimer(NamedTuple):
    """Send `Timer(key)` at this time, or at once when it has passed."""

    at: float
    key: int
    reason: str


class Choose(NamedTuple):
    """From now on a version is made of `quorum` arrivals. The coordinator only writes it into the trace."""

    quorum: int
    reason: str


Action: TypeAlias = Start | Apply | Drop | Cancel | SetTimer | Choose
