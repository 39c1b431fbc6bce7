"""The two ways in which a script's iterations become versions; `DataParallel` has one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quorate.engines.collective.decided import Decided, Verdict, decision_of
from quorate.engines.collective.free_running import FreeRunning
from quorate.engines.collective.hooks import GradientHooks
from quorate.engines.collective.partial_steps import PartialSteps
from quorate.engines.collective.pending import plain
from quorate.engines.collective.plane import Plane
from quorate.engines.collective.receipts import Receipt
from quorate.engines.collective.rounds import describe
from quorate.errors import QuorateError
from quorate.parallel.sampler import Sampler
from quorate.parallel.stopwatch import Stopwatch

Send = Callable[..., None]


class IterationOver(QuorateError):  # noqa: N818 - it is no error: the iteration is given up
    """The version that this iteration computes on is over; `DataParallel.iteration()` catches it."""


class Driver(ABC):
    """Takes a script's iterations through the rounds.

    send: sends a control message (kind, fields) to worker 0.
    """

    plane: Plane
    #: Whether backward sends its gradients (not inside `no_sync`).
    syncing = True

    def __init__(self, steps: PartialSteps, sampler: Sampler | None, send: Send, version: int) -> None:
        self._steps, self._sampler, self._send = steps, sampler, send
        self.base = version  # batches are lent for versions counted from here, since the run began or was resumed
        self.version = version  # updates that the parameters have had, or will have had when they are read next
        self.samples: int | None = None  # in the batch at hand, where that is known
        self._stopwatch = Stopwatch()

    @property
    def is_late(self) -> bool:
        return False

    @property
    def _weight(self) -> float:
        """What the gradient at hand counts: samples, where the sampler knows them, so that each sample counts once."""
        return 1.0 if self._sampler is None else float(self._sampler.samples_in_hand)

    def begin(self) -> None:
        """A forward that will have gradients begins."""
        self._begin()
        self._stopwatch.begin(self.plane.waited_s)

    @abstractmethod
    def _begin(self) -> None: ...

    def step(self) -> Receipt:
        """`optimizer.step()`."""
        parts = self._stopwatch.end(self.plane.waited_s)
        receipt = self._step(parts)
        self._done(receipt)
        return receipt

    def _done(self, receipt: Receipt) -> None:
        self._stopwatch.restart()
        self.version = receipt.version
        if self._sampler is not None and not receipt.over:
            self._sampler.stepped(receipt.version - self.base)

    @abstractmethod
    def _step(self, parts: dict[str, float]) -> Receipt: ...

    def give_up(self) -> Receipt | None:
        """Leave the iteration at hand if its version is over."""
        return None

    def listen(self, abandons: bool) -> None:  # noqa: B027 - only some can be late
        """Whether a late iteration is to be abandoned where it stands."""

    def heard(self, message: dict[str, Any]) -> None:  # noqa: B027
        """A control message came; called in the link's thread."""

    @abstractmethod
    def finish(self) -> None:
        """Bring nothing more, and end together with the others."""

    def close(self) -> None:  # noqa: B027
        """Take our hooks off the model."""


class FreeDriver(Driver):
    """Full and delayed sync: every process is in every round.

    is_traced: somebody wants to know when each process was done.
    """

    def __init__(
        self,
        make: Callable[..., FreeRunning],
        steps: PartialSteps,
        sampler: Sampler | None,
        send: Send,
        version: int,
        is_traced: bool,
    ) -> None:
        super().__init__(steps, sampler, send, version)
        self.plane: FreeRunning = make(sits_out=self._sits_out, send=lambda message: send(**message))
        self.plane.on_discard = self._discarded
        self.plane.applied_version = version
        self._hooks = GradientHooks(self.plane, lambda: self.syncing, lambda: self._weight)
        self._is_traced = is_traced

    def _sits_out(self, number: int) -> bool:
        return self._sampler is not None and self._sampler.sits_out(self._sampler.first_round + number)

    def _discarded(self) -> None:
        if self._sampler is not None:
            self._sampler.stepped(self.version - self.base)

    def _begin(self) -> None:
        self._hooks.check_is_whole()
        self.plane.begin_iteration()

    def _step(self, parts: dict[str, float]) -> Receipt:
        round = self.plane.step(self._steps.hyper())
        if self.plane.delay or self.plane.pending:  # their buffers are needed for rounds to come
            self._hooks.forget()
        if round is None:
            over = self.plane.is_over
            return Receipt(False, self.version, "the others have ended" if over else "there was no gradient", over=over)
        if self._is_traced:
            self._send("arrived", version=self.base + round.number, samples=self.samples, **parts)
        # Rounds that this process sits out after its step are applied before it reads anything again.
        version = self.base + self.plane.to_be_read
        return Receipt(True, version, "all are in", staleness=min(self.plane.pending, self.plane.delay))

    def heard(self, message: dict[str, Any]) -> None:
        self.plane.heard(message)

    def finish(self) -> None:
        self.plane.finish()
        self.version = self.plane.applied_version
        self._send("finished")

    def close(self) -> None:
        self._hooks.remove()


class DecidedDriver(Driver):
    """Backups and deadlines: the policy decides who is in a round.

    finishes_late: late work is brought all the same, and only then dropped (`late="finish"`).
    """

    def __init__(
        self,
        plane: Decided,
        steps: PartialSteps,
        sampler: Sampler | None,
        send: Send,
        version: int,
        finishes_late: bool,
    ) -> None:
        super().__init__(steps, sampler, send, version)
        self.plane: Decided = plane
        plane.reading = plane.decided_version = plane.applied_version = version
        self._finishes_late = finishes_late
        self._is_fresh = True  # nothing was computed since the last step
        self._count = 0
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
            if self.plane.is_late and not self._finishes_late:
                self.plane.catch_up()  # versions went by while the script did something else
            self.version = self.plane.reading
            self._send("began", version=self.version)

    def _step(self, parts: dict[str, float]) -> Receipt:
        self.listen(False)  # what follows the step in an `iteration()`, such as zero_grad(), is not to be skipped
        self._is_fresh = True
        self._count += 1
        plane, version = self.plane, self.plane.reading
        if plane.over is not None:
            return self._receipt(Verdict(False, plane.over, over=True))
        if plane.is_late:
            # Late work that is to be finished is brought when this process is on the newest version: the coordinator
            # then starts it there.
            receipt = self._missed(version)
            self._send(
                "arrived" if self._finishes_late else "abandoned", version=version, samples=self.samples, **parts
            )
            return receipt
        round = plane.collect(self._gradient, self._weight)
        if not plane.is_finite(round):
            plane.give_up(round)
            self._send("refused", version=version)
            return Receipt(False, version, "it held NaN or Inf", lost_samples=self._lost())
        hyper = [{key: describe(value) for key, value in group.items()} for group in self._steps.hyper()]
        verdict = plane.offer(
            round,
            lambda: self._send(
                "arrived", version=version, samples=self.samples, hyper=hyper, steps=self._count, **parts
            ),
        )
        return self._receipt(verdict)

    def _missed(self, version: int) -> Receipt:
        return self._receipt(self.plane.miss(version + 1))

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

    def give_up(self) -> Receipt | None:
        if self._is_fresh or not self.plane.is_late or self._finishes_late:
            return None
        self._is_fresh = True
        parts = self._stopwatch.end(self.plane.waited_s)
        for parameter in self.plane.layout.parameters:
            parameter.grad = None
        self._send("abandoned", version=self.plane.reading, samples=self.samples, **parts)
        receipt = self._missed(self.plane.reading)
        self._done(receipt)
        return receipt

    def catch_up(self, version: int) -> int:
        """The sampler has a batch that is meant for a newer version than the one here; counted from `base`."""
        self.version = self.plane.catch_up(version + self.base)
        return self.version - self.base

    def listen(self, abandons: bool) -> None:
        self.plane.abandon = IterationOver if abandons and not self._finishes_late else None

    def heard(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "go":
            self.plane.decide(decision_of(message, self._steps.hyper()))
        elif kind == "over":
            self.plane.end(message["reason"])

    def finish(self) -> None:
        self._send("finished")
        self.plane.finish()
        self.version = self.plane.applied_version

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
