"""The contract that every engine keeps, and one contract suite tests."""

from __future__ import annotations

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
from quorate.outfolder import save_parameters
from quorate.policies import POLICIES, Policy
from quorate.stopping import Stop
from quorate.task import BoundTask


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an engine is asked to run."""

    task: BoundTask | None  # None: no gradients
    policy: Policy
    ledger: Ledger
    learning: Learning
    seed: int
    stop: Stop | None = None  # whether somebody wants the run to end, also while it is being opened


class Outcome(NamedTuple):
    """What came of applying arrivals."""

    loss: float | None  # sample-weighted mean over the applied arrivals; None without gradients
    norm: float | None  # global norm of the averaged gradient before clipping, where it was computed
    refused: tuple[Ticket, ...] = ()  # turned out to hold NaN or Inf only now, and were left out
    apply_s: float | None = None  # how long it took, where time is real
    norms: Norms | None = None  # on versions where they are taken (quorate.noise)


class CheckpointWriter(Protocol):
    """Writes one checkpoint at a time while the run goes on."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""

    def submit(self, version: int, state: dict[str, Any]) -> None:
        """Begin to write a checkpoint."""

    def finish(self) -> None:
        """Wait for the checkpoint being written."""


class Engine(ABC):
    """Runs tickets somewhere. The coordinator calls these methods, from one thread, between open and close."""

    name: ClassVar[str]
    #: Names of the policies it can run.
    policies: ClassVar[frozenset[str]] = frozenset(POLICIES)
    #: Whether `state` and `restore` can be called.
    keeps_checkpoints: ClassVar[bool] = False
    #: Whether a part of the newest version may be lost (LearnerLost): the run then steps back to its last checkpoint.
    may_lose_learner: ClassVar[bool] = False

    workers: int

    def check(self, policy: Policy) -> None:
        """Refuse a policy that this engine cannot run, before anything is started."""
        if policy.name not in self.policies:
            can = ", ".join(sorted(self.policies))
            raise BadInput(f"the {self.name} engine cannot run policy {policy.name!r}; it runs: {can}")
        policy.check(self.workers)

    @abstractmethod
    def open(self, job: Job) -> None:
        """Get ready; workers that are there report themselves as WorkerJoined events."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the trace's header says of this engine, as JSON values."""

    @abstractmethod
    def start(self, ticket: Ticket) -> None:
        """Let the ticket's worker compute. Its Arrived or Refused event carries this very object."""

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """The ticket in flight is over; its worker may be started again at once."""

    @abstractmethod
    def drop(self, ticket: Ticket) -> None:
        """The arrived ticket will not be applied; its gradient can go."""

    @abstractmethod
    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        """Make the next version of these arrivals, summed in this order."""

    def now(self, time: float) -> float:
        """What time it is after `time`, when the last event was given. A simulated clock stands still meanwhile."""
        return time

    @abstractmethod
    def set_timer(self, at: float, key: int) -> None:
        """Give a Timer event at that time."""

    @abstractmethod
    def next_event(self, until: float | None) -> Event | None:
        """Wait for the next event; None when `until` passes first, or when nothing can happen any more."""

    def settle(self) -> None:  # noqa: B027 - most engines have nothing under way
        """The run is over: finish what is under way, so that the parameters can be read."""

    # ------------------------------------------------------------ the model; only with gradients

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """The task's measures of the newest version."""

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """A copy of the newest parameters and buffers, by name; empty without gradients."""

    @abstractmethod
    def averaged_parameters(self) -> dict[str, Tensor] | None:
        """The same with the moving average of the parameters, where one is kept."""

    def digest(self) -> str | None:
        """The fingerprint of the newest parameters and buffers; None without gradients."""
        parameters = self.parameters()
        return digest(parameters) if parameters else None

    def write_parameters(self, path: Path) -> None:
        """Write the newest parameters and buffers into a file; nothing without gradients."""
        save_parameters(path, self.parameters())

    @abstractmethod
    def parameter_bytes(self) -> int:
        """Size of one version of the parameters, which is also the size of a gradient."""

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Copies of everything a resumed run needs: the learner, and older versions that may still be started on."""
        raise BadInput(f"the {self.name} engine keeps no checkpoints")

    def restore(self, state: dict[str, Any], time: float) -> None:
        """Continue from a state that a checkpoint has; it is `time` now.

        Called after open, before the first event; and after a LearnerLost, when nothing under way counts any more.
        """
        raise BadInput(f"the {self.name} engine keeps no checkpoints")

    def check_can_save(self) -> None:
        """Refuse, before the run begins, what no checkpoint can hold."""
        check_can_save(self.state())

    def checkpoint_writer(self, folder: CheckpointFolder, on_failure: Callable[[str], None]) -> CheckpointWriter:
        """What writes the states that `state` gives; `on_failure` gets a sentence when the disk refused one."""
        return BackgroundWriter(folder, on_failure)

    def learner_leaves(self) -> bool:
        """Whether a part of the newest version is on a machine that has announced its end."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give everything back; safe to call twice."""
