"""The contract of every engine; tests/contract checks it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from quorate.checkpoint import BackgroundWriter, CheckpointFolder, check_can_save
from quorate.errors import BadInput
from quorate.events import Event, Ticket
from quorate.learner import Learning, digest
from quorate.ledger import Ledger
from quorate.noise import Norms
from quorate.out_folder import save_parameters
from quorate.policies import Policy
from quorate.stopping import Stop
from quorate.task import BoundTask


@dataclass(frozen=True, kw_only=True)
class Job:
    """The run that an engine is opened for."""

    task: BoundTask | None  # None: no gradients are computed
    policy: Policy
    ledger: Ledger
    learning: Learning
    seed: int
    patience_s: float = math.inf  # timeout for a silent worker; raised where tickets regularly take longer
    stop: Stop | None = None  # the user's request to end the run, which also counts while the engine opens


class Outcome(NamedTuple):
    """Result of applying arrivals."""

    loss: float | None  # sample-weighted mean over the applied arrivals; None without gradients
    norm: float | None  # global norm of the averaged gradient before clipping, where it was computed
    refused: tuple[Ticket, ...] = ()  # left out, because NaN or Inf was found only during the update
    apply_s: float | None = None  # duration of the update, in engines that run in real time
    norms: Norms | None = None  # on versions that measure the gradient noise (quorate.noise)


class CheckpointWriter(Protocol):
    """Writes one checkpoint at a time in the background."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""

    def submit(self, version: int, state: dict[str, Any]) -> None:
        """Start writing a checkpoint."""

    def finish(self) -> None:
        """Wait for the checkpoint being written."""


class Engine(ABC):
    """Runs tickets somewhere. The coordinator calls these methods, from one thread, between open and close."""

    name: ClassVar[str]
    #: Whether the engine implements `state` and `restore`.
    keeps_checkpoints: ClassVar[bool] = False
    #: Whether a shard of the newest version may be lost (LearnerLost): the run then rolls back to its last checkpoint.
    may_lose_learner: ClassVar[bool] = False

    workers: int

    def check(self, policy: Policy) -> None:
        """Refuse a policy that this engine cannot run, before any worker starts."""
        policy.check(self.workers)

    @abstractmethod
    def open(self, job: Job) -> None:
        """Get ready. Every available worker reports itself with a WorkerJoined event."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The engine's entry in the trace header, as JSON values."""

    def header(self) -> dict[str, Any]:
        """Fields of the trace header that only this engine has, as JSON values."""
        return {}

    def core_waits(self) -> dict[int, float]:
        """Seconds that each worker process of this machine was ready to run but had no core; {}: not known."""
        return {}

    @abstractmethod
    def start(self, ticket: Ticket) -> None:
        """Let the ticket's worker compute. Its Arrived or Refused event carries the same ticket object."""

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """End a ticket in flight. Its worker may be started again at once."""

    @abstractmethod
    def drop(self, ticket: Ticket) -> None:
        """Free the gradient of an arrived ticket that will not be applied."""

    @abstractmethod
    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None, reason: str) -> Outcome:
        """Make the next version from these arrivals, summed in this order.

        reason: the reason of the decision; the collective engine sends it to its processes.
        """

    def now(self, time: float) -> float:
        """The current time; `time` is that of the last event. A simulated clock stands still between events."""
        return time

    @abstractmethod
    def set_timer(self, at: float, key: int) -> None:
        """Schedule a Timer event."""

    @abstractmethod
    def next_event(self, until: float | None) -> Event | None:
        """Wait for the next event; None when `until` passes first, or when no further event can come."""

    def settle(self) -> None:  # noqa: B027 - most engines have no pending work
        """Finish pending work at the end of the run, so that the parameters can be read."""

    # ------------------------------------------------------------ the model; only with gradients

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """The task's measures of the newest version."""

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """A copy of the newest parameters and buffers, by name; empty without gradients."""

    @abstractmethod
    def averaged_parameters(self) -> dict[str, Tensor] | None:
        """As `parameters`, with the moving average of the parameters; None if the run keeps no average."""

    def digest(self) -> str | None:
        """Fingerprint of the newest parameters and buffers; None without gradients."""
        parameters = self.parameters()
        return digest(parameters) if parameters else None

    def write_parameters(self, path: Path) -> None:
        """Write the newest parameters and buffers into a file; without gradients no file is written."""
        save_parameters(path, self.parameters())

    @abstractmethod
    def parameter_bytes(self) -> int:
        """Size of one version of the parameters, which is also the size of a gradient."""

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Copies of the state a resumed run needs: the learner, and older versions that tickets may still read."""
        raise BadInput(f"the {self.name} engine keeps no checkpoints")

    def restore(self, state: dict[str, Any], time: float) -> None:
        """Continue at `time` from the state in a checkpoint.

        Called after `open`, before the first event; and after a LearnerLost event, which voids all open tickets.
        """
        raise BadInput(f"the {self.name} engine keeps no checkpoints")

    def check_can_save(self) -> None:
        """Refuse, before the run begins, a state that no checkpoint can hold."""
        check_can_save(self.state())

    def checkpoint_writer(self, folder: CheckpointFolder, on_failure: Callable[[str], None]) -> CheckpointWriter:
        """The writer of checkpoints; it calls `on_failure` with a sentence if the disk refuses one."""
        return BackgroundWriter(folder, on_failure)

    def learner_leaves(self) -> bool:
        """Whether a shard of the newest version is on a machine that has announced its shutdown."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release all resources; safe to call twice."""
