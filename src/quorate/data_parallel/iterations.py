"""How a script's iterations become versions: `FullSyncIterations` or `QuorumIterations`, as the policy requires."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from quorate.data_parallel.full_sync import FullSyncPlane, GradientHooks
from quorate.data_parallel.lazy_tensors import plain
from quorate.data_parallel.optimizer_steps import PartialSteps, hyper_as_json, hyper_from_json
from quorate.data_parallel.plane import Plane
from quorate.data_parallel.quorum import Decision, QuorumPlane, Verdict
from quorate.data_parallel.sampler import Sampler
from quorate.errors import QuorateError


class Receipt(NamedTuple):
    """Whether a gradient was used.

    version: number of updates in the parameters that the next iteration reads.
    staleness: number of updates between the computation of the gradient and its own update.
    late_s: seconds between the end of its version and the arrival of a dropped gradient.
    lost_samples: samples of a dropped batch that will not come again in this epoch (0 with `quorate.Sampler`, which
        hands them out again; None if the size of the batch is not known).
    over: no more updates will be made, because the other processes have ended.
    """

    applied: bool
    version: int
    reason: str
    staleness: int = 0
    late_s: float = 0.0
    lost_samples: int | None = 0
    over: bool = False


class Stopwatch:
    """Splits the time between two `step()` calls into loading data (until the first forward), computing and waiting."""

    def __init__(self) -> None:
        self._ended = time.monotonic()
        self._began: float | None = None
        self._waited_before = 0.0

    def begin(self, waited_s: float) -> None:
        """Call this before a forward; the first of an iteration counts. waited_s: total wait for updates so far."""
        if self._began is None:
            self._began, self._waited_before = time.monotonic(), waited_s

    def end(self, waited_s: float) -> dict[str, float]:
        """Call this when `step()` is called; returns the parts of the iteration."""
        now = time.monotonic()
        began = now if self._began is None else self._began
        waited = 0.0 if self._began is None else waited_s - self._waited_before
        return {
            "data_s": max(0.0, began - self._ended),
            "compute_s": max(0.0, now - began - waited),
            "transfer_s": max(0.0, waited),
        }

    def restart(self) -> None:
        """Call this when `step()` returns."""
        self._ended, self._began = time.monotonic(), None


Send = Callable[..., None]


class IterationOver(QuorateError):  # noqa: N818 - not an error: the iteration is abandoned
    """The version that this iteration computes on is over; `DataParallel.iteration()` catches this."""


class Iterations(ABC):
    """Turns a script's iterations into rounds of the data plane.

    send: sends a control message (kind, fields) to worker 0.
    """

    plane: Plane
    syncing = True  # False inside `no_sync`: backward does not send its gradients

    def __init__(self, steps: PartialSteps, sampler: Sampler | None, send: Send, version: int) -> None:
        self._steps, self._sampler, self._send = steps, sampler, send
        self.base = version  # the version at the start or resumption of the run; the sampler counts from here
        self.version = version  # number of updates in the parameters that are read next
        self.where = "the model's constructor"  # the script's last call of a DataParallel method
        self.samples: int | None = 0  # in the micro-batches since the last step; None: not known
        self.until: int | None = None  # in `model.steps()`: the version of the next meeting
        self._stopwatch = Stopwatch()

    @property
    def is_late(self) -> bool:
        return False

    def waits(self) -> tuple[str, float] | None:
        """Where the script's thread waits for other processes, and since when; None if it does not wait."""
        if self.plane.waits_since is not None:
            return self.where, self.plane.waits_since
        if self._sampler is not None and self._sampler.waits_since is not None:
            return "the loop over the loader", self._sampler.waits_since
        return None

    def _weight(self) -> float:
        """The weight of the current gradient: its samples if there is a sampler, so that each sample counts once."""
        return 1.0 if self._sampler is None else float(self._sampler.samples_in_hand)

    def begin(self, samples: int | None = None) -> None:
        """A forward with gradients begins. samples: the size of its batch; None: not known."""
        self.samples = None if samples is None or self.samples is None else self.samples + samples
        self.where = "forward"
        self._begin()
        self._stopwatch.begin(self.plane.waited_s)

    @abstractmethod
    def _begin(self) -> None: ...

    def step(self) -> Receipt:
        """The script calls `optimizer.step()`."""
        self.where = "optimizer.step()"
        parts = self._stopwatch.end(self.plane.waited_s)
        return self._done(self._step(parts))

    def _done(self, receipt: Receipt) -> Receipt:
        self._stopwatch.restart()
        self.samples = 0
        self.version = receipt.version
        if self._sampler is not None and not receipt.over:
            self._sampler.stepped(receipt.version - self.base)  # This may end a pass, which changes self.version.
        return receipt._replace(version=self.version)

    @abstractmethod
    def _step(self, parts: dict[str, float]) -> Receipt: ...

    def give_up(self, was_interrupted: bool) -> Receipt | None:
        """Give the current iteration up if its version is over. was_interrupted: by `IterationOver`."""
        return None

    def listen(self, abandons: bool) -> None:  # noqa: B027 - only quorums have late iterations
        """Set whether a late iteration is abandoned at once."""

    @abstractmethod
    def heard(self, message: dict[str, Any]) -> None:
        """Handle a control message, in the link's thread."""

    @abstractmethod
    def number(self) -> int:
        """The number of the next iteration: the updates before it, made or still pending."""

    def catch_up(self, version: int) -> int:
        """The sampler has a batch for a newer version; returns the version here. Both are counted from `base`."""
        return version

    def pass_begins(self) -> None:  # noqa: B027
        """A pass of the sampler begins."""

    @abstractmethod
    def pass_over(self) -> int:
        """A pass of the sampler is over: wait for the common version, and return it, counted from `base`."""

    @abstractmethod
    def meet(self) -> None:
        """Wait for all other processes; then all have the same version."""

    @abstractmethod
    def finish(self) -> None:
        """Send no more gradients, and end together with the other processes."""

    @abstractmethod
    def close(self) -> None:
        """Remove the hooks from the model."""


class FullSyncIterations(Iterations):
    """Full and delayed sync: every process is in every round.

    is_traced: some process writes a trace, which needs the arrival time of every process.
    """

    def __init__(
        self,
        make: Callable[..., FullSyncPlane],
        steps: PartialSteps,
        sampler: Sampler | None,
        send: Send,
        version: int,
        is_traced: bool,
    ) -> None:
        super().__init__(steps, sampler, send, version)
        self.plane: FullSyncPlane = make(sits_out=self._sits_out, send=lambda message: send(**message))
        self.plane.on_discard = self._discarded
        self.plane.applied_version = version
        self._hooks = GradientHooks(self.plane, lambda: self.syncing, self._weight)
        self._is_traced = is_traced

    def _sits_out(self, number: int) -> bool:
        return self._sampler is not None and number + self.base != self.until and self._sampler.sits_out(number)

    def _discarded(self) -> None:
        if self._sampler is not None:
            self._sampler.stepped(self.version - self.base)

    def _begin(self) -> None:
        self._hooks.check_is_whole()
        self.plane.begin_iteration()

    def _step(self, parts: dict[str, float]) -> Receipt:
        round = self.plane.step(self._steps.hyper())
        if self.plane.delay or self.plane.pending:  # Later rounds need the buffers of these gradients.
            self._hooks.forget()
        if round is None:
            over = self.plane.is_over
            return Receipt(False, self.version, "the others have ended" if over else "there was no gradient", over=over)
        if self._is_traced:
            self._send("arrived", version=self.base + round.number, samples=self.samples, **parts)
        # Rounds that this process sits out after its step are applied before its next read.
        version = self.base + self.plane.to_be_read
        return Receipt(True, version, "all are in", staleness=min(self.plane.pending, self.plane.delay))

    def heard(self, message: dict[str, Any]) -> None:
        self.plane.heard(message)

    def number(self) -> int:
        return self.base + self.plane.iteration

    def pass_over(self) -> int:
        self.plane.begin_iteration()  # Apply rounds that this process sits out.
        if self.plane.delay and self.until is None:  # Updates are pending; `model.steps()` has its own meetings.
            self.plane.meet()
        self.version = self.base + self.plane.to_be_read
        return self.plane.to_be_read

    def meet(self) -> None:
        self.plane.meet()
        self.version = self.base + self.plane.to_be_read

    def finish(self) -> None:
        self._hooks.settle()
        self.plane.finish()
        self.version = self.plane.applied_version
        self._send("finished")

    def close(self) -> None:
        self._hooks.remove()


class QuorumIterations(Iterations):
    """Backups and deadlines: the policy decides who is in a round.

    finishes_late: late gradients are computed to the end and only then dropped (`late="finish"`).
    """

    def __init__(
        self,
        plane: QuorumPlane,
        steps: PartialSteps,
        sampler: Sampler | None,
        send: Send,
        version: int,
        finishes_late: bool,
    ) -> None:
        super().__init__(steps, sampler, send, version)
        self.plane: QuorumPlane = plane
        plane.reading = plane.decided_version = plane.applied_version = version
        self._finishes_late = finishes_late
        self._is_fresh = True  # no forward since the last step
        self._count = 0  # steps of this process
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: plane.leave_if_late())  # type: ignore[no-untyped-call]
            for parameter in plane.layout.parameters
        ]

    @property
    def is_late(self) -> bool:
        return self.plane.is_late

    def _begin(self) -> None:
        if self._is_fresh:
            self._is_fresh = False
            self.plane.begin()
            if self.plane.is_late and not self._finishes_late and self.until is None:
                self.plane.catch_up()  # Versions were made while the script did something else.
            self.version = self.plane.reading
            if not self._holds_echo:
                self._send("began", version=self.version)

    @property
    def _holds_echo(self) -> bool:
        return self._sampler is not None and self._sampler.holds_echo

    def _step(self, parts: dict[str, float]) -> Receipt:
        self.listen(False)  # Calls after the step inside an `iteration()`, such as zero_grad(), must not be skipped.
        self._is_fresh = True
        self._count += 1
        plane, version = self.plane, self.plane.reading
        until, self.until = self.until, None
        if plane.over is not None:
            return self._receipt(Verdict(False, plane.over, over=True))
        if self._holds_echo:
            assert self._sampler is not None
            self._sampler.wait_in_echo()
            plane.catch_up()
            return self._receipt(Verdict(False, "no batch was left: this one is computed elsewhere"))
        if plane.is_late:
            # Report a late gradient only after catching up: the coordinator then starts this process on that version.
            receipt = self._receipt(plane.miss(version + 1))
            kind = "arrived" if self._finishes_late else "abandoned"
            self._send(kind, version=version, samples=self.samples, **parts)
            return receipt
        if until is not None and version >= until:  # The sampler's batch was for the version of the meeting.
            plane.restore_buffers()
            self._send("abandoned", version=version, samples=self.samples, **parts)
            return Receipt(False, version, "the other processes wait in model.steps()", lost_samples=self._lost())
        round = plane.collect(self._gradient, self._weight())
        if round is None:
            self._send("refused", version=version)
            return Receipt(False, version, "it held NaN or Inf", lost_samples=self._lost())
        fields = {"version": version, "samples": self.samples, "steps": self._count, **parts}
        hyper = hyper_as_json(self._steps.hyper())
        return self._receipt(plane.offer(round, lambda: self._send("arrived", hyper=hyper, **fields)))

    def _receipt(self, verdict: Verdict) -> Receipt:
        lost = 0 if verdict.applied else self._lost()
        version = self.plane.reading
        return Receipt(verdict.applied, version, verdict.reason, 0, verdict.late_s, lost, verdict.over)

    def _lost(self) -> int | None:
        return 0 if self._sampler is not None else self.samples

    def _gradient(self, member: int) -> Tensor | None:
        layout = self.plane.layout
        if member >= len(layout.parameters):
            return layout.tensor(member)
        gradient = layout.parameters[member].grad
        return None if gradient is None else plain(gradient)

    def give_up(self, was_interrupted: bool) -> Receipt | None:
        # An iteration without a forward is over only if reading a parameter interrupted it; else its step has ended it.
        if (self._is_fresh and not was_interrupted) or not self.plane.is_late or self._finishes_late:
            return None
        self._is_fresh = True
        self.plane.begin()
        parts = self._stopwatch.end(self.plane.waited_s)
        for parameter in self.plane.layout.parameters:
            parameter.grad = None
        if not self._holds_echo:
            self._send("abandoned", version=self.plane.reading, samples=self.samples, **parts)
        return self._done(self._receipt(self.plane.miss(self.plane.reading + 1)))

    def catch_up(self, version: int) -> int:
        self.version = self.plane.catch_up(version + self.base)
        return self.version - self.base

    def listen(self, abandons: bool) -> None:
        self.plane.abandon = IterationOver if abandons and not self._finishes_late else None

    def heard(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "go":
            own = self._steps.hyper()
            hyper = hyper_from_json(message.get("hyper") or own, own)
            members, now = frozenset(message["members"]), time.monotonic()
            self.plane.decide(Decision(message["version"], members, hyper, message["reason"], now))
        elif kind == "over":
            self.plane.end(message["reason"])
        elif kind == "met":
            self.plane.met(message["version"])
        elif kind == "vain" and message["to"] == self.plane.worker:
            self.plane.reject_offer()

    def number(self) -> int:
        if self._is_fresh and self.plane.is_late and not self._finishes_late:
            self.version = self.plane.catch_up()  # The next forward would do the same.
        return self.version

    def pass_begins(self) -> None:
        self.plane.begin()  # The first batch may have to wait for versions, which are made only after `begin`.

    def pass_over(self) -> int:
        self.where = "the end of a pass over the loader"
        self._meet(lacking=False)  # Other processes may still make versions of the rest of the epoch.
        return self.version - self.base

    def meet(self) -> None:
        self._meet(lacking=True)

    def _meet(self, lacking: bool) -> None:
        self._is_fresh = True
        self.version = self.plane.meet(lambda: self._send("meet", lacking=lacking))

    def finish(self) -> None:
        self._send("finished")
        self.plane.finish()
        self.version = self.plane.applied_version

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
