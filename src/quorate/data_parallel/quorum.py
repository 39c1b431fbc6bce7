"""Rounds in which a quorum is enough: backups and deadlines.

The policy in worker 0's process decides who is in a round, and all processes are told. Then every process takes part
in the all-reduce, with zeros if it is not in the quorum, so that all have the same next version. A process that is
still computing by then is late: its gradient cannot be used. Its parameters stay as they are until it asks for the
newest ones. Meanwhile the versions that it misses are made on a copy of the parameters, the *shadow*.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from quorate.data_parallel.buckets import BucketLayout, PieceOrder
from quorate.data_parallel.optimizer_steps import Hyper, PartialSteps
from quorate.data_parallel.plane import Plane, Round, Transport


class Decision(NamedTuple):
    """The members of a version's quorum, and the hyperparameters of its update."""

    version: int
    members: frozenset[int]
    hyper: Hyper
    reason: str
    at: float  # time.monotonic() when this process received the decision


class Verdict(NamedTuple):
    """Whether an offered gradient was used, and why."""

    applied: bool
    reason: str
    late_s: float = 0.0
    over: bool = False


class QuorumPlane(Plane):
    """The data plane for policies that decide who is in a round."""

    def __init__(
        self, layout: BucketLayout, group: Transport, worker: int, steps: PartialSteps, *, clip_norm: float | None
    ) -> None:
        super().__init__(layout, group, worker, steps, slots=2, clip_norm=clip_norm)
        self.reading = 0  # the version that the user's thread computes on
        self.decided_version = 0
        self.over: str | None = None  # why no more versions are made
        #: Raised in the user's thread once its version is over, when it reads a parameter or computes a gradient.
        self.abandon: type[Exception] | None = None
        self._decisions: deque[Decision] = deque()  # not yet exchanged
        self._last: dict[int, Decision] = {}  # by version, decisions that the user's thread may still ask for
        self._offer: Round | None = None
        self._at_rest = False  # the user's thread waits in a call, so its parameters may be changed
        self._rejected: Round | None = None  # an offer that will get no quorum
        self._is_meeting = False  # the user's thread is in `meet`
        self._meets_at: int | None = None  # the version of the meeting, until the user's thread has it
        self._is_idle = True  # the updating thread has no work
        self._has_begun = False  # the script trains; before that it may still load a checkpoint
        #: The buffers of the newest version: a forward whose gradient is not used must not change them.
        self._buffers = {buffer: buffer.detach().clone() for buffer in layout.buffers}

    def begin(self) -> None:
        """The script's first iteration begins: from now on only the plane changes the model."""
        if not self._has_begun:
            for buffer, of_version in self._buffers.items():
                of_version.copy_(buffer.detach())
            with self.changing():
                self._has_begun = True

    def synchronize(self) -> None:
        """Wait until every released update is applied; no update is applied before the first iteration."""
        if self._has_begun:
            super().synchronize()

    @property
    def is_late(self) -> bool:
        """Whether the version that the user's thread computes on is over."""
        return self.decided_version > self.reading

    # ------------------------------------------------------------ messages from the coordinator

    def decide(self, decision: Decision) -> None:
        with self.changing():
            self._decisions.append(decision)
            self._last[decision.version] = decision
            self.decided_version = decision.version
            if self.abandon is not None:
                self.gate.closed = True  # The next read then calls `leave_if_late`.

    def reject_offer(self) -> None:
        """The other processes wait in a meeting, so the offer of this process makes no version."""
        with self.changing():
            self._rejected = self._offer

    def met(self, version: int) -> None:
        """All processes wait in `meet`; `version` is the newest."""
        with self.changing():
            if self._is_meeting:  # A process that has finished does not meet.
                self._meets_at = version

    def end(self, reason: str) -> None:
        """No more versions will be made."""
        with self.changing():
            self.over = reason

    # ------------------------------------------------------------ the user's thread

    def wait_until_readable(self, numbers: Iterable[int]) -> None:
        self.leave_if_late()
        super().wait_until_readable(numbers)

    def leave_if_late(self) -> None:
        """Abandon a late iteration, if `abandon` is set."""
        if self.abandon is not None and self.is_late and not self._at_rest:
            raise self.abandon("its version is over")

    def collect(self, gradient_of: Callable[[int], Tensor | None], weight: float) -> Round | None:
        """Copy this iteration's gradients into a round; None if one of them holds NaN or Inf."""
        round = self._new_round(self.reading + 1, weight)
        self.fill_up(round, gradient_of)
        if round.slot.is_finite():
            return round
        with self.changed:
            self._give_slot(round.slot)
        self.restore_buffers()
        return None

    def offer(self, round: Round, report: Callable[[], None]) -> Verdict:
        """Offer a round to the quorum of its version, and wait for the decision."""
        with self.changed:
            self._offer = round
            self._at_rest = True
        report()
        self.wait_for(
            lambda: (
                round.released
                or self.decided_version >= round.number
                or self.over is not None
                or self._rejected is round
            )
        )
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
            is_rejected = decision is None and self._rejected is round
            if is_rejected:
                self._at_rest = False
        if is_rejected:
            self.restore_buffers()
            return Verdict(False, "the other processes wait in model.meet()")
        return self.miss(round.number)

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
        """Wait for the newest version, which is `least` or newer, and read it from now on."""
        with self.changing():
            self._at_rest = True
        self.wait_for(lambda: self.over is not None or (self._is_settled() and self.applied_version >= least))
        with self.changed:
            # Wait for versions decided since then, too: otherwise the next iteration is late from its start.
            while not self._is_settled() and self.error is None:
                self.changed.wait()
            self.gate.closed = bool(self._unreadable)
            self._read(self.applied_version)
        self._read_buckets()
        return self.reading

    def meet(self, report: Callable[[], None]) -> int:
        """Wait until every process is in this call; all leave with the newest version."""
        self.begin()
        with self.changing():
            self._at_rest = self._is_meeting = True
        report()
        self.wait_for(lambda: self.over is not None or self._is_at_meeting())
        if self._meets_at is None:
            return self.catch_up()
        with self.changed:
            self._read(self._meets_at)
        self._read_buckets()
        with self.changing():
            self._is_meeting, self._meets_at = False, None
        return self.reading

    def _is_at_meeting(self) -> bool:
        """Whether the parameters are the meeting's version; newer ones wait until the user's thread has it."""
        return self._is_idle and self._shadow is None and self.applied_version == self._meets_at

    def _is_settled(self) -> bool:
        nothing_left = not self._decisions and not self._released and self._is_idle
        return nothing_left and self._shadow is None and self.applied_version == self.decided_version

    def _read(self, version: int) -> None:
        """The user's thread computes on this version now; the caller holds `changed`."""
        self._at_rest = False
        self.reading = version
        self._forget_decisions()

    def _read_buckets(self) -> None:
        super().wait_until_readable(range(len(self.layout.buckets)))
        self.restore_buffers()

    def _forget_decisions(self) -> None:
        for version in [version for version in self._last if version <= self.reading]:
            del self._last[version]

    def restore_buffers(self) -> None:
        """Undo the changes that forward has made to buffers since the newest version."""
        with torch.no_grad():
            for buffer, of_version in self._buffers.items():
                buffer.copy_(of_version)

    def finish(self) -> None:
        """Offer no more gradients; returns when no more versions are made."""
        self.begin()
        with self.changing():
            self._at_rest = True
        self.wait_for(lambda: self.over is not None and self._is_settled())
        self.synchronize()
        self.restore_buffers()
        self._end()

    def release(self) -> None:
        super().release()
        self._buffers.clear()
        self._offer = None

    # ------------------------------------------------------------ the communication thread

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
            order = PieceOrder(self.layout.buckets, self.layout.urgency)
            order.heard([0.0] * len(self.layout.buckets))  # All buckets are ready, so only urgency counts.
            self._exchange(round, order)

    def _round_of(self, decision: Decision) -> Round:
        """The offered round if this process is in the quorum, otherwise a round of zeros."""
        with self.changed:
            if self.worker in decision.members:
                round, self._offer = self._offer, None
                assert round is not None and round.number == decision.version, "in a quorum without a gradient"
                return round
        round = self._new_round(decision.version, 0.0)
        self.fill_up(round, lambda member: None)
        return round

    def _closes_gate(self, round: Round) -> bool:
        return round.weight > 0  # A process outside the quorum goes on reading its old version.

    def _close_gate(self, round: Round) -> None:
        # Now, and not when the user's thread wakes up: the next version may be made by then.
        self._at_rest = False
        self.reading = round.number
        super()._close_gate(round)

    # ------------------------------------------------------------ the updating thread

    def _update(self) -> None:
        while True:
            with self.changing():
                self._is_idle = True
            self.wait_for(lambda: self._may_update() or self._closing or self._may_leave_shadow())
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

    def _may_update(self) -> bool:
        if not self._released or not self._has_begun:
            return False
        return self._meets_at is None or self._released[0].number <= self._meets_at

    def _may_leave_shadow(self) -> bool:
        return self._at_rest and self._shadow is not None

    def _prepare_shadow(self, round: Round) -> None:
        """Copy the parameters before a version that the user's thread neither contributed to nor waits for."""
        with self.changed:
            needed = round.weight == 0 and not self._at_rest and self._shadow is None
        if needed:
            self._shadow = {tensor: tensor.detach().clone() for tensor in self.layout.parameters}

    def _leave_shadow(self) -> None:
        """Copy the shadow back into the parameters."""
        assert self._shadow is not None
        with torch.no_grad():
            for tensor, newest in self._shadow.items():
                tensor.detach().copy_(newest)
        buckets = range(len(self.layout.buckets))
        with self.changed:
            self._shadow = None
            self._unreadable.update(dict.fromkeys(buckets, ...))
        for bucket in buckets:
            self._open_gate(None, bucket)

    def newest_buffers(self) -> dict[Tensor, Tensor]:
        return dict(self._buffers)

    def _set_buffer(self, round: Round, member: int, average: Tensor) -> None:
        buffer = self.layout.tensor(member)
        self._buffers[buffer].copy_(average if buffer.dtype.is_floating_point else average.round())
        if self._shadow is None:
            super()._set_buffer(round, member, average)
