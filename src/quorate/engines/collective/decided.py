"""Rounds in which a quorum is enough: backups and deadlines.

Who is in a round is decided once, by the policy in worker 0's process, and told to all. Then every process takes part
in the all-reduce, those that are not in it with zeros, so that all have the same next version. A process that is still
computing then cannot use what it computes; its parameters stay as they are until it asks for the newest, and the
versions it misses are made on a *shadow* of them meanwhile.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quorate.engines.collective.layout import Layout
from quorate.engines.collective.ordering import Order
from quorate.engines.collective.partial_steps import Hyper, PartialSteps
from quorate.engines.collective.plane import Group, Plane
from quorate.engines.collective.rounds import Round


class Decision(NamedTuple):
    """Who made a version, and with which hyperparameters it is applied."""

    version: int
    members: frozenset[int]
    hyper: Hyper
    reason: str
    at: float  # when this process heard of it


class Verdict(NamedTuple):
    """What became of an offered gradient."""

    applied: bool
    reason: str
    late_s: float = 0.0
    over: bool = False


class Decided(Plane):
    """The data plane where the policy decides who is in a round."""

    def __init__(
        self, layout: Layout, group: Group, worker: int, steps: PartialSteps, *, clip_norm: float | None
    ) -> None:
        super().__init__(layout, group, worker, steps, slots=2, clip_norm=clip_norm)
        self.reading = 0  # the version that the user's thread computes on
        self.decided_version = 0
        self.over: str | None = None
        self.patience_s = 60.0  # after so long in vain the user is told what may be wrong
        #: Raised where the user's thread reads a parameter or computes a gradient, once its version is over.
        self.abandon: type[Exception] | None = None
        self._decisions: deque[Decision] = deque()  # not yet exchanged
        self._last: dict[int, Decision] = {}  # by version, those that the user's thread may ask for
        self._offer: Round | None = None
        self._at_rest = False  # the user's thread waits here: its parameters may be changed
        self._shadow: dict[Tensor, Tensor] | None = None
        self._is_idle = True  # the updating thread
        self._has_begun = False  # the script trains; before that it may still load a checkpoint
        #: The buffers of the newest version here: a forward whose gradient is not used must not leave its marks.
        self._buffers = {buffer: buffer.detach().clone() for buffer in layout.buffers}

    def begin(self) -> None:
        """The script's first iteration begins: from now on nobody but us changes the model."""
        if not self._has_begun:
            for buffer, of_version in self._buffers.items():
                of_version.copy_(buffer.detach())
            with self.changed:
                self._has_begun = True
                self.changed.notify_all()

    @property
    def is_late(self) -> bool:
        """Whether the version that the user's thread computes on is over."""
        return self.decided_version > self.reading

    # ------------------------------------------------------------ what the coordinator says

    def decide(self, decision: Decision) -> None:
        with self.changed:
            self._decisions.append(decision)
            self._last[decision.version] = decision
            self.decided_version = decision.version
            if self.abandon is not None:
                self.gate.closed = True  # so that the next read looks
            self.changed.notify_all()

    def wait_until_readable(self, numbers: Iterable[int]) -> None:
        self.leave_if_late()
        super().wait_until_readable(numbers)

    def leave_if_late(self) -> None:
        """Abandon the iteration under way if that is wanted and it is late."""
        if self.abandon is not None and self.is_late and not self._at_rest:
            raise self.abandon("its version is over")

    def end(self, reason: str) -> None:
        """No more versions will be made."""
        with self.changed:
            self.over = reason
            self.changed.notify_all()

    # ------------------------------------------------------------ the user's thread

    def collect(self, gradient_of: Callable[[int], Tensor | None], weight: float) -> Round:
        """Put this iteration's gradients together."""
        round = self._new_round(self.reading + 1, weight)
        self.fill_up(round, gradient_of)
        return round

    def is_finite(self, round: Round) -> bool:
        """Whether a round's own gradients hold neither NaN nor Inf."""
        return round.slot.is_finite()

    def give_up(self, round: Round) -> None:
        """A collected round is not offered."""
        with self.changed:
            self._give_slot(round.slot)
        self.restore_buffers()

    def offer(self, round: Round, report: Callable[[], None]) -> Verdict:
        """Offer a round to the quorum of its version; returns when it is known what becomes of it."""
        with self.changed:
            self._offer = round
            self._at_rest = True
        report()
        self._wait_for_quorum(round)
        with self.changed:
            decision = self._last.get(round.number)
            if decision is not None and self.worker in decision.members:
                self.changed.wait_for(lambda: round.released or self.error is not None)
                if self.error is not None:
                    self._raise()
                self._forget_decisions()
                return Verdict(True, decision.reason)
            self._offer = None
            self._give_slot(round.slot)
        return self.miss(round.number)

    def _wait_for_quorum(self, round: Round) -> None:
        def is_known() -> bool:
            return round.released or self.decided_version >= round.number or self.over is not None

        with self.changed:
            in_time = self.changed.wait_for(lambda: self.error is not None or is_known(), self.patience_s)
        if not in_time:
            warnings.warn(
                f"process {self.worker} has waited {self.patience_s:g} s for the quorum of version {round.number}: the "
                "others live, but bring no gradients. Do they wait for this one, as in a dist.barrier() between steps?",
                RuntimeWarning,
                stacklevel=2,
            )
        self.wait_for(is_known)

    def miss(self, number: int) -> Verdict:
        """The round of this number was made without this process: go on from the newest version."""
        decision = self._last.get(number)
        if decision is None:
            self.restore_buffers()
            return Verdict(False, self.over or "no more versions are made", over=True)
        late_s = time.monotonic() - decision.at
        self.catch_up()
        return Verdict(False, f"late: version {number} was made without it", late_s)

    def catch_up(self, least: int = 0) -> int:
        """Take over the newest version, which is at least this one."""
        with self.changed:
            self._at_rest = True
            self.changed.notify_all()
        self.wait_for(lambda: self.over is not None or (self._is_settled() and self.applied_version >= least))
        with self.changed:
            # More may have been decided since; that is waited for, too, so that nobody is late from the start.
            while not self._is_settled() and self.error is None:
                self.changed.wait()
            self._at_rest = False
            self.reading = self.applied_version
            self.gate.closed = bool(self._unreadable)
            self._forget_decisions()
        super().wait_until_readable(range(len(self.layout.buckets)))
        self.restore_buffers()
        return self.reading

    def restore_buffers(self) -> None:
        """Take back what forward did to buffers since the version here."""
        with torch.no_grad():
            for buffer, of_version in self._buffers.items():
                buffer.copy_(of_version)

    def _is_settled(self) -> bool:
        nothing_left = not self._decisions and not self._released and self._is_idle
        return nothing_left and self._shadow is None and self.applied_version == self.decided_version

    def _forget_decisions(self) -> None:
        for version in [version for version in self._last if version <= self.reading]:
            del self._last[version]

    def finish(self) -> None:
        """Bring nothing more; returns when no more versions are made."""
        self.begin()
        with self.changed:
            self._at_rest = True
            self.changed.notify_all()
        self.wait_for(lambda: self.over is not None and self._is_settled())
        self.synchronize()
        self.restore_buffers()
        self._end()

    # ------------------------------------------------------------ the other threads

    def _communicate(self) -> None:
        while True:
            self.wait_for(lambda: self._decisions or self.over is not None or self._closing)
            if not self._decisions:
                return
            decision = self._decisions[0]
            round = self._round_of(decision)
            round.hyper = decision.hyper
            self._release(round)
            with self.changed:
                self._decisions.popleft()
            order = Order(self.layout.buckets, self.layout.urgency)
            order.heard([0.0] * len(self.layout.buckets))  # everything is there: what is needed first goes first
            self._exchange(round, order)

    def _round_of(self, decision: Decision) -> Round:
        with self.changed:
            if self.worker in decision.members:
                round, self._offer = self._offer, None
                assert round is not None and round.number == decision.version, "in a quorum without a gradient"
                return round
        round = self._new_round(decision.version, 0.0)
        self.fill_up(round, lambda member: None)
        return round

    def _close_gate(self, round: Round) -> None:
        if round.weight > 0:  # otherwise the user's thread goes on reading what it has
            # From here on, not from when that thread wakes up: the next version may be made by then.
            self._at_rest = False
            self.reading = round.number
            super()._close_gate(round)

    def _update(self) -> None:
        while True:
            with self.changed:
                self._is_idle = True
                self.changed.notify_all()
            self.wait_for(lambda: (self._released and self._has_begun) or self._closing or self._may_leave_shadow())
            with self.changed:
                self._is_idle = False
                leave = self._may_leave_shadow()
            if leave:
                self._leave_shadow()
            elif self._released:
                self._prepare_shadow(self._released[0])
                self._update_once()
            else:
                return

    def _may_leave_shadow(self) -> bool:
        return self._at_rest and self._shadow is not None

    def _prepare_shadow(self, round: Round) -> None:
        """Make a version that the user's thread has no part in on a copy, unless it waits for it."""
        with self.changed:
            needed = round.weight == 0 and not self._at_rest and self._shadow is None
        if needed:
            self._shadow = {tensor: tensor.detach().clone() for tensor in self.layout.parameters}

    def _leave_shadow(self) -> None:
        assert self._shadow is not None
        with torch.no_grad():
            for tensor, newest in self._shadow.items():
                tensor.detach().copy_(newest)
        with self.changed:
            self._shadow = None
            for bucket in range(len(self.layout.buckets)):
                self._unreadable[bucket] = ...
        for bucket in range(len(self.layout.buckets)):
            self._open_gate(None, bucket)

    def _instead(self) -> dict[Tensor, Tensor] | None:
        return self._shadow

    def newest_buffers(self) -> dict[Tensor, Tensor]:
        return dict(self._buffers)

    def _closes_gate(self, round: Round) -> bool:
        return round.weight > 0

    def _set_buffer(self, round: Round, member: int, average: Tensor) -> None:
        buffer = self.layout.tensor(member)
        self._buffers[buffer].copy_(average if buffer.dtype.is_floating_point else average.round())
        if self._shadow is None:
            super()._set_buffer(round, member, average)


def decision_of(message: dict[str, Any], own: Hyper) -> Decision:
    """What a go message says; what JSON cannot carry stays this process's own."""
    told = message.get("hyper") or own
    hyper = [{**mine, **theirs} for mine, theirs in zip(own, told, strict=True)]
    return Decision(message["version"], frozenset(message["members"]), hyper, message["reason"], time.monotonic())
