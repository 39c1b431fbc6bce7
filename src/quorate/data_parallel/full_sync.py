"""Rounds in which every process takes part: full sync, and sync with a delay.

There is no decision to wait for, so buckets are sent during backward, the most urgent first: `GradientHooks` sends each
gradient as soon as it is computed, and leaves a pending average in its place. The update of iteration i
is applied before iteration i + 1 + delay. A process that has run out of batches takes part without a gradient until all
processes have run out.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quorate.data_parallel.buckets import BucketLayout, PieceOrder
from quorate.data_parallel.lazy_tensors import PendingGradient, plain
from quorate.data_parallel.optimizer_steps import Hyper, PartialSteps, hyper_as_json, hyper_from_json
from quorate.data_parallel.plane import Plane, Round, Transport, synchronize
from quorate.errors import BadInput, QuorateError


class FullSyncPlane(Plane):
    """The data plane of full sync (delay 0) and delayed sync.

    delay: the largest delay, in iterations; delay_at: the delay of an iteration.
    sits_out: whether this process has no batch in the round of a given number.
    send: sends a message to all other processes.
    """

    def __init__(
        self,
        layout: BucketLayout,
        group: Transport,
        worker: int,
        steps: PartialSteps,
        *,
        delay: int = 0,
        delay_at: Callable[[int], int] | None = None,
        clip_norm: float | None,
        sits_out: Callable[[int], bool],
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(layout, group, worker, steps, slots=delay + 1, clip_norm=clip_norm)
        self.delay = delay
        self._delay_at = delay_at if delay_at is not None else lambda iteration: delay
        self.iteration = 0  # rounds stepped or sat out so far
        self.is_over = False  # all processes have finished
        self.on_discard: Callable[[], None] | None = None  # called when a round is given up
        #: The worker whose hyperparameters all use; None: all must have the same, which is checked.
        self.leader: int | None = None
        #: Send a round after backward, not during it: where cores are busy, sending slows backward down.
        self.holds_back = False
        self._checksum = 0
        if not delay:
            self._joined = None  # The script may read averages, so they lie in the round's own memory.
        self._sits_out, self._send = sits_out, send
        numbers = [member for bucket in layout.buckets if bucket.holds_buffers for member in bucket.members]
        self._buffers_before = {member: layout.tensor(member).detach().clone() for member in numbers if delay}
        #: With a delay: the buffers as of the applied updates, without this process's later iterations.
        self.agreed_buffers = {layout.tensor(member): one.clone() for member, one in self._buffers_before.items()}
        self._to_exchange: deque[Round] = deque()
        self._stepped: deque[Round] = deque()  # not yet released
        self._open: Round | None = None  # being filled by backward, or filled and not yet stepped
        self._next_number = 0
        self._resting = False  # the user's thread waits in a meeting
        self._finished = False  # it is the last meeting of this process
        self._meetings = [0] * layout.header.workers  # by worker, the number of its latest meeting
        self._ended: set[int] = set()  # workers that have finished
        self._entered: dict[int, int] = {}  # by number of the last meeting, the last round that a process has entered
        self._hypers: dict[int, Any] = {}  # by round, received hyperparameters

    # ------------------------------------------------------------ the user's thread

    def begin_backward(self, weight: float, adds_up: bool = False) -> Round | None:
        """Open a round for a backward pass; None if all processes have finished.

        A round that was never stepped is given up. adds_up: the new gradients contain those of that round.
        """
        if self._open is not None:
            self._discard(self._open, adds_up)
        self.begin_iteration()
        if not self.is_over:
            self._open = self._enter(weight)
        return self._open

    def _enter(self, weight: float) -> Round:
        round = self._new_round(self._next_number, weight)
        if self.leader is None and weight > 0:
            round.checksum, self._checksum = self._checksum, 0
        self._next_number += 1
        with self.changed:
            self._to_exchange.append(round)
            self.changed.notify_all()
            others_rest = bool(self._ended) or max(self._meetings) > self._meetings[self.worker]
        if others_rest:
            self._say_entering(round.number)
        return round

    def _say_entering(self, number: int) -> None:
        """Ask processes that wait in a later meeting to take part in rounds up to this one."""
        self._send({"kind": "entering", "round": number, "meeting": self._meetings[self.worker]})

    def put(self, round: Round, member: int, gradient: Tensor) -> None:
        """Add a computed gradient to its round."""
        if round.fill(member, gradient):
            with self.changed:
                self.changed.notify_all()

    def _discard(self, round: Round, adds_up: bool = False) -> None:
        """Free the buffers of a round that is averaged but never stepped (a scaler saw Inf, a second backward)."""
        self.wait_for(lambda: all(round.averaged))
        if self._is_source(round) and len(round.contributors()) < self.layout.header.workers:
            # The other processes wait for the hyperparameters of this round.
            self._send({"kind": "hyper", "round": round.number, "hyper": None})
        with self.changed:
            self._give_slot(round.slot)
        self._open = None
        if self.on_discard is not None and not adds_up:
            self.on_discard()

    def step(self, hyper: Hyper) -> Round | None:
        """Let the gradients of this iteration be applied; returns their round, or None without gradients."""
        round = self._open
        if round is None:
            return None
        self._open = None
        round.hyper = hyper
        self._checksum = _checksum_of(hyper)
        self._stepped.append(round)
        self.iteration += 1
        self._release_due()
        if self._sits_out(self._next_number):
            self._sit_out()  # Now, so that no process waits for this one; its update is applied in `begin_iteration`.
        return round

    def begin_iteration(self) -> None:
        """Before the first forward of an iteration: apply the rounds that this process sits out."""
        if self._open is not None and self._sits_out(self._next_number):
            self._discard(self._open)  # The script skipped its step, and the next round needs these buffers.
        while self._sits_out(self._next_number) and not self.is_over:
            self._sit_out()
            self._release_due()
        self._release_due()

    def _sit_out(self) -> None:
        """Take part without a gradient in a round that has no batch for this process."""
        round = self._enter(0.0)
        self.fill_up(round, lambda member: None)
        self._stepped.append(round)
        self.iteration += 1

    @property
    def to_be_read(self) -> int:
        """The number of updates in the parameters that the next iteration reads."""
        return self.iteration - min(len(self._stepped), self._delay_at(self.iteration))

    @property
    def pending(self) -> int:
        """The number of stepped iterations whose updates must not be read yet."""
        return len(self._stepped)

    def _release_due(self) -> None:
        """Release the updates that the next iteration must read."""
        self._release_all_but(self._delay_at(self.iteration))

    def _release_all_but(self, count: int) -> None:
        while len(self._stepped) > count:
            self._release(self._stepped.popleft())

    def buffer_to_send(self, round: Round, member: int) -> Tensor:
        """The value of a buffer; with a delay, the change that this iteration made to it."""
        buffer = self.layout.tensor(member).detach()
        if not self.delay:
            return buffer
        before = self._buffers_before[member]
        round.sent[member] = buffer - before
        before.copy_(buffer)
        return round.sent[member]

    def _set_buffer(self, round: Round, member: int, average: Tensor) -> None:
        if not self.delay:
            super()._set_buffer(round, member, average)
            return
        # Later iterations have changed the buffer, too. So only this iteration's change is replaced by the average.
        buffer, own = self.layout.tensor(member), round.sent.get(member)
        correction = average if own is None else average - own
        before, agreed = self._buffers_before[member], self.agreed_buffers[buffer]
        for target, change in ((buffer.detach(), correction), (before, correction), (agreed, average)):
            target.add_(change if target.dtype.is_floating_point else change.round().to(target.dtype))

    def gradient(self, round: Round, member: int) -> Tensor | None:
        """Wait for the average of a gradient; None if no process has this gradient."""
        number = self.layout.bucket_of[member]
        # The updating thread uses the averages from the release of the update until it is applied.
        self.wait_for(lambda: round.applied[number] if round.released else round.averaged[number])
        return round.averages(number).get(member)

    def meet(self) -> None:
        """Apply all stepped rounds, and take part without gradients until every process is in this call."""
        if self.is_over:
            return
        if self._open is not None:
            self._discard(self._open)
        self._release_all_but(0)
        with self.changing():
            self._resting = True
            meeting = self._meetings[self.worker] = self._meetings[self.worker] + 1
        self._send({"kind": "ended", "round": self._next_number - 1, "meeting": meeting, "last": self._finished})
        self.wait_for(lambda: not self._resting)
        self.synchronize()

    def finish(self) -> None:
        """Send no more gradients; returns when all processes have finished."""
        with self.changed:
            self._finished = True
        self.meet()
        self.agreed_buffers.clear()  # Now the model's own buffers are the same in all processes.
        self._end()

    def release(self) -> None:
        super().release()
        for kept in (self._stepped, self._to_exchange, self._buffers_before):
            kept.clear()
        self._open = self.on_discard = None
        self._sits_out, self._send = lambda number: False, lambda message: None

    def quiesce(self) -> None:
        super().quiesce()
        under_way = [*self._stepped, *([] if self._open is None else [self._open])]
        self.wait_for(lambda: all(all(round.averaged) for round in under_way))

    def heard(self, message: dict[str, Any]) -> None:
        """A control message that a process sends to all.

        A round without gradients costs as much as one with them. So a process that waits in a meeting takes part only
        in rounds that another process has entered; the other processes send it the number of the round.
        """
        kind, entered = message["kind"], None
        with self.changing():
            if kind == "hyper" and message["worker"] != self.worker:
                self._hypers[message["round"]] = message["hyper"]
                self._hypers.pop(message["round"] - 64, None)  # This process used its own hyperparameters there.
            elif kind in ("entering", "ended"):
                # "entering" names the meeting before its round, "ended" the meeting after it.
                after = message["meeting"] - (kind == "ended")
                known = {one: number for one, number in self._entered.items() if number >= self._next_number}
                self._entered = {**known, after: max(known.get(after, -1), message["round"])}
            if kind == "ended":
                worker = message["worker"]
                self._meetings[worker] = max(self._meetings[worker], message["meeting"])
                if message["last"]:
                    self._ended.add(worker)
                if worker != self.worker and not self._resting and self._next_number:
                    entered = self._next_number - 1
        if entered is not None:
            self._say_entering(entered)

    # ------------------------------------------------------------ the other threads

    def _communicate(self) -> None:
        before: list[int | None] | None = None
        while True:
            self.wait_for(lambda: self._to_exchange or (self._resting and (self._is_awaited() or self._all_are_here())))
            without_gradient = not self._to_exchange
            if without_gradient and not self._is_awaited():
                # A process that has finished takes no part in an all-reduce of buffers before all have finished.
                here = self._meetings[self.worker]
                if self._finished or all(self._meetings[worker] > here for worker in self._ended):
                    self._share_buffers()
                with self.changing():
                    self._resting, self.is_over = False, self._finished
                if self.is_over:
                    return
                continue
            if without_gradient:
                round = self._new_round(self._next_number, 0.0)
                self._next_number += 1
                self.fill_up(round, lambda member: None)
            else:
                with self.changed:
                    round = self._to_exchange.popleft()
            if self.holds_back:
                self.wait_for(lambda: all(round.ready))  # noqa: B023 - called at once
            order = PieceOrder(self.layout.buckets, self.layout.urgency, before)
            self._exchange(round, order)
            before = order.ready_at
            self._check_checksums(round)
            if without_gradient:
                self.iteration += 1
                self._release(round)

    def _share_buffers(self) -> None:
        """Copy worker 0's buffers to all processes, as DDP does.

        Buffers differ after a forward without an update; with a delay they also differ by rounding.
        """
        self.wait_for(lambda: not self._released)
        synchronize(self._device)
        for buffer in self.layout.buffers:
            sent = buffer.detach().clone() if self.worker == 0 else torch.zeros_like(buffer)
            self._group.allreduce([sent]).wait()
            buffer.detach().copy_(sent)
        for member, before in self._buffers_before.items():
            buffer = self.layout.tensor(member)
            self.agreed_buffers[buffer].copy_(before.copy_(buffer.detach()))
        synchronize(self._device)

    def _is_awaited(self) -> bool:
        """Whether a process that is not yet in this meeting waits for this process in a round.

        A process that has left the meeting does not count: this process leaves, too, and brings a gradient.
        """
        here = self._meetings[self.worker]
        return any(
            number >= self._next_number and (after < here or self._finished) for after, number in self._entered.items()
        )

    def _all_are_here(self) -> bool:
        """Whether every process has come to this meeting; at the end, whether every process has finished."""
        here = self._meetings[self.worker]
        absent = [worker for worker, meeting in enumerate(self._meetings) if self._finished or meeting < here]
        return self._ended.issuperset(absent)

    def _is_source(self, round: Round) -> bool:
        """Whether the other processes apply this round with the hyperparameters of this process."""
        contributors = round.contributors()
        return bool(contributors) and self.worker == (self.leader if self.leader in contributors else contributors[0])

    def _hyper_of(self, round: Round) -> Hyper | None:
        all_are_in = len(round.contributors()) == self.layout.header.workers
        if self._is_source(round):
            if not all_are_in or self.leader is not None:
                assert round.hyper is not None
                self._send({"kind": "hyper", "round": round.number, "hyper": hyper_as_json(round.hyper)})
        elif round.hyper is None or self.leader is not None:
            self.wait_for(lambda: round.number in self._hypers)
            with self.changed:
                received = self._hypers.pop(round.number)
            own = round.hyper or self._steps.hyper()
            round.hyper = None if received is None else hyper_from_json(received, own)
        return round.hyper

    def _check_checksums(self, round: Round) -> None:
        """Refuse hyperparameters that differ between processes: the parameters would differ from then on."""
        checksums = {worker: checksum for worker, checksum in enumerate(round.checksums) if checksum}
        if len(set(checksums.values())) > 1:
            first = min(checksums)
            other = next(worker for worker in sorted(checksums) if checksums[worker] != checksums[first])
            raise QuorateError(
                f"process {other} made its last step with other hyperparameters than process {first}, so their "
                "parameters differ from now on: set learning rates and the like at the same update in every process "
                "(schedulers that step by epochs need the same number of batches everywhere)"
            )


def _checksum_of(hyper: Hyper) -> int:
    """A checksum of hyperparameters from 1 to 250: any float type holds these numbers exactly."""
    return 1 + zlib.crc32(json.dumps(hyper_as_json(hyper), default=repr).encode()) % 250


class GradientHooks:
    """Receives every gradient of the model while `syncing()`; `weight()` is the weight of a backward pass."""

    def __init__(self, plane: FullSyncPlane, syncing: Callable[[], bool], weight: Callable[[], float]) -> None:
        self._plane, self._syncing, self._weight = plane, syncing, weight
        self._round: Round | None = None  # round of the current backward pass
        self._in_backward = False
        self._numbers = {id(parameter): number for number, parameter in enumerate(plane.layout.parameters)}
        self._absent: dict[int, _Average] = {}  # by parameter number, where this process computed no gradient
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._computed)  # type: ignore[no-untyped-call]
            for parameter in plane.layout.parameters
        ]

    def check_is_whole(self) -> None:
        """Refuse to go on after an interrupted backward pass: other processes have received parts of it."""
        if self._in_backward:
            raise QuorateError(
                "the last backward pass broke off in the middle, when other processes had received some of its "
                "gradients: no update can be made of it; let the error end the script, and start from a checkpoint"
            )

    def settle(self) -> None:
        """Replace pending gradients by copies of the averages, whose buffers are reused after this."""
        for member, parameter in enumerate(self._plane.layout.parameters):
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad = parameter.grad.settled().clone() if self._has_gradient(member) else None
        self._absent = {}

    def forget(self) -> None:
        """Clear pending gradients, because the gradients of this iteration belong to a later update."""
        for parameter in self._plane.layout.parameters:
            if isinstance(parameter.grad, PendingGradient):
                parameter.grad = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.forget()
        self._syncing, self._weight = lambda: False, lambda: 0.0

    def _computed(self, parameter: Tensor) -> None:
        if not self._syncing():
            return
        if not self._in_backward:
            self._in_backward = True
            # A pending gradient here means no step since the last pass: autograd has added this pass to its average.
            self._round = self._plane.begin_backward(self._weight(), isinstance(parameter.grad, PendingGradient))
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)
        if self._round is not None:
            self._send(self._round, self._numbers[id(parameter)], parameter)

    def _send(self, round: Round, member: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise BadInput("a parameter has a sparse gradient, which no all-reduce can average; use sparse=False")
        self._plane.put(round, member, plain(parameter.grad))
        parameter.grad = PendingGradient(parameter, _Average(self._plane, round, member).settle)

    def _backward_is_over(self) -> None:
        """Complete the round: parameters that backward did not reach send an earlier gradient (`no_sync`) or none."""
        round, self._round, self._in_backward = self._round, None, False
        if round is None:
            return
        parameters = self._plane.layout.parameters
        absent: dict[int, _Average] = {}
        for member in round.unfilled():
            if member >= len(parameters):
                continue
            if self._has_gradient(member):
                self._send(round, member, parameters[member])
            else:  # Another process may have a gradient, and clipping must see the same gradients in all processes.
                absent[member] = _Average(self._plane, round, member)
                parameters[member].grad = PendingGradient(parameters[member], absent[member].settle)
        self._absent = absent
        self._plane.fill_up(round, lambda member: self._rest(round, member))

    def _has_gradient(self, member: int) -> bool:
        gradient = self._plane.layout.parameters[member].grad
        if isinstance(gradient, PendingGradient) and member in self._absent:
            return not self._absent[member].is_nothing
        return gradient is not None

    def _rest(self, round: Round, member: int) -> Tensor | None:
        """The value to send for a buffer; None for a parameter that this process did not use."""
        if member < len(self._plane.layout.parameters) or round.weight == 0:
            return None
        return self._plane.buffer_to_send(round, member)


class _Average:
    """The future average of a gradient, or zeros if no process computed that gradient."""

    def __init__(self, plane: FullSyncPlane, round: Round, member: int) -> None:
        self._plane, self._round, self._member = plane, round, member
        self._zeros: Tensor | None = None

    def settle(self) -> Tensor:
        average = self._plane.gradient(self._round, self._member)
        if average is not None:
            return average
        if self._zeros is None:  # Always the same tensor: a later backward may add to it.
            self._zeros = torch.zeros_like(self._plane.layout.tensor(self._member))
        return self._zeros

    @property
    def is_nothing(self) -> bool:
        """Whether no process computed a gradient in the finished round, and no later pass added one."""
        if self._plane.gradient(self._round, self._member) is not None:
            return False
        return self._zeros is None or not bool(self._zeros.any())
