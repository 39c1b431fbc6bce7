"""Rounds in which every process takes part: full sync, and sync with a delay.

Nothing has to be decided, so buckets leave during backward, the most urgent first, and the update of iteration i is
applied before iteration i + 1 + delay. A process that has run out of batches takes part without a gradient until
nobody has any.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quorate.engines.collective.layout import Layout
from quorate.engines.collective.ordering import Order
from quorate.engines.collective.partial_steps import Hyper, PartialSteps
from quorate.engines.collective.plane import Group, Plane
from quorate.engines.collective.rounds import Round, describe
from quorate.errors import QuorateError


class FreeRunning(Plane):
    """The data plane of full sync (delay 0) and delayed sync.

    delay: how late updates may be at most; delay_at: by iteration.
    sits_out: whether this process has no batch in a round, by number.
    send: sends a message to all other processes.
    """

    def __init__(
        self,
        layout: Layout,
        group: Group,
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
        self._iteration = 0  # rounds stepped, or sat out, so far
        self.on_discard: Callable[[], None] | None = None  # called when a round is given up
        #: Whose hyperparameters count in every round; None: all have the same, which is checked.
        self.leader: int | None = None
        self._stamp = 0
        self._sits_out, self._send = sits_out, send
        numbers = [member for bucket in layout.buckets if bucket.holds_buffers for member in bucket.members]
        self._buffers_before = {member: layout.tensor(member).detach().clone() for member in numbers if delay}
        self._to_exchange: deque[Round] = deque()
        self._stepped: deque[Round] = deque()  # not yet released
        self._open: Round | None = None  # being filled by backward, or filled and not yet stepped
        self._next_number = 0
        self._finished = False
        self._done = False
        self._ended: set[int] = set()  # workers that bring nothing more
        self._entered = -1  # the last round that anybody has entered, as far as that matters
        self._hypers: dict[int, Any] = {}  # by round, of rounds that this process took no part in

    # ------------------------------------------------------------ the user's thread

    def begin_backward(self, weight: float, adds_up: bool = False) -> Round | None:
        """A backward pass gives its first gradient; None when all others have ended already.

        A round that was never stepped is given up. adds_up: its gradients are part of those that come now.
        """
        if self._open is not None:
            self._discard(self._open, adds_up)
        self.begin_iteration()
        if not self._done:
            self._open = self._enter(weight)
        return self._open

    def _enter(self, weight: float) -> Round:
        round = self._new_round(self._next_number, weight)
        if self.leader is None and weight > 0:
            round.stamp, self._stamp = self._stamp, 0
        self._next_number += 1
        with self.changed:
            self._to_exchange.append(round)
            self.changed.notify_all()
            somebody_ended = bool(self._ended)
        if somebody_ended:
            self._send({"kind": "entering", "round": round.number})
        return round

    def put(self, round: Round, member: int, gradient: Tensor) -> None:
        """A gradient is computed."""
        if round.fill(member, gradient):
            with self.changed:
                self.changed.notify_all()

    def _discard(self, round: Round, adds_up: bool = False) -> None:
        """Averaged but never stepped (a scaler that saw Inf, a second backward): its buffers are free again."""
        self.wait_for(lambda: all(round.averaged))
        if self._is_source(round) and len(round.contributors()) < self.layout.header.workers:
            self._send({"kind": "hyper", "round": round.number, "hyper": None})  # the others must not wait for it
        with self.changed:
            self._give_slot(round.slot)
        self._open = None
        if self.on_discard is not None and not adds_up:
            self.on_discard()

    def step(self, hyper: Hyper) -> Round | None:
        """The gradients of this iteration are to be applied; gives their round, if there are any."""
        round = self._open
        if round is None:
            return None
        self._open = None
        round.hyper = hyper
        self._stamp = _stamp_of(hyper)
        self._stepped.append(round)
        self._iteration += 1
        self._release_due()
        if self._sits_out(self._next_number):
            self._sit_out()  # now, so that nobody waits for it; but applied only when an iteration begins
        return round

    def begin_iteration(self) -> None:
        """Before the first forward of an iteration: rounds that went by without this process are applied now."""
        if self._open is not None and self._sits_out(self._next_number):
            self._discard(self._open)  # a skipped step: it has the buffers that the next round needs
        while self._sits_out(self._next_number) and not self._done:
            self._sit_out()
            self._release_due()
        self._release_due()

    def _sit_out(self) -> None:
        """Take part without a gradient in a round that has no batch for this process."""
        round = self._enter(0.0)
        self.fill_up(round, lambda member: None)
        self._stepped.append(round)
        self._iteration += 1

    @property
    def to_be_read(self) -> int:
        """How many updates the parameters will have had when the next iteration reads them."""
        return self._iteration - min(len(self._stepped), self._delay_at(self._iteration))

    @property
    def pending(self) -> int:
        """How many iterations are stepped whose updates are not to be read yet."""
        return len(self._stepped)

    @property
    def is_over(self) -> bool:
        """Whether all processes have ended."""
        return self._done

    def _release_due(self) -> None:
        """What the iteration that comes next must read is applied."""
        self._release_all_but(self._delay_at(self._iteration))

    def _release_all_but(self, count: int) -> None:
        while len(self._stepped) > count:
            self._release(self._stepped.popleft())

    def buffer_to_send(self, round: Round, member: int) -> Tensor:
        """What the others are told of a buffer: itself, or with a delay by how much this iteration has changed it."""
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
        # Later iterations have changed it since: only this one's change is replaced by the average of all.
        buffer, own = self.layout.tensor(member).detach(), round.sent.get(member)
        change = average if own is None else average - own
        change = (change if buffer.dtype.is_floating_point else change.round()).to(buffer.dtype)
        buffer.add_(change)
        self._buffers_before[member].add_(change)

    def gradient(self, round: Round, member: int) -> Tensor | None:
        """The average of a gradient of this iteration, once it is there; None where nobody has one."""
        number = self.layout.bucket_of[member]
        # Once its update is released the buffer is in use until the update is applied.
        self.wait_for(lambda: round.applied[number] if round.released else round.averaged[number])
        return round.averages(number).get(member)

    def finish(self) -> None:
        """Bring nothing more; returns when nobody does."""
        if self._open is not None:
            self._discard(self._open)
        self._release_all_but(0)
        with self.changed:
            self._finished = True
            self.changed.notify_all()
        self._send({"kind": "ended", "round": self._next_number - 1})
        self.wait_for(lambda: self._done)
        self.synchronize()
        self._end()

    def heard(self, message: dict[str, Any]) -> None:
        """What a process says to all.

        A round costs as much without gradients as with them, so a process that has ended takes part only in rounds that
        somebody else has entered; those who go on tell it which.
        """
        kind, entered = message["kind"], None
        with self.changed:
            if kind == "hyper" and message["worker"] != self.worker:
                self._hypers[message["round"]] = message["hyper"]
                self._hypers.pop(message["round"] - 64, None)  # this process had its own
            elif kind in ("entering", "ended"):
                self._entered = max(self._entered, message["round"])
            if kind == "ended":
                self._ended.add(message["worker"])
                if not self._finished and self._next_number:
                    entered = self._next_number - 1
            self.changed.notify_all()
        if entered is not None:
            self._send({"kind": "entering", "round": entered})

    # ------------------------------------------------------------ the other threads

    def _communicate(self) -> None:
        before: list[int | None] | None = None
        while True:
            self.wait_for(lambda: self._to_exchange or (self._finished and (self._is_awaited() or self._all_ended())))
            alone = not self._to_exchange
            if alone and not self._is_awaited():
                break
            if alone:
                round = self._new_round(self._next_number, 0.0)
                self._next_number += 1
                self.fill_up(round, lambda member: None)
            else:
                with self.changed:
                    round = self._to_exchange.popleft()
            order = Order(self.layout.buckets, self.layout.urgency, before)
            self._exchange(round, order)
            before = order.ready_at
            self._check_stamps(round)
            if alone:
                self._release(round)
        with self.changed:
            self._done = True
            self.changed.notify_all()

    def _is_awaited(self) -> bool:
        return self._entered >= self._next_number

    def _all_ended(self) -> bool:
        return len(self._ended) == self.layout.header.workers

    def _is_source(self, round: Round) -> bool:
        """Whether others apply this round with the hyperparameters of this process."""
        contributors = round.contributors()
        return bool(contributors) and self.worker == (self.leader if self.leader in contributors else contributors[0])

    def _hyper_of(self, round: Round) -> Hyper | None:
        all_are_in = len(round.contributors()) == self.layout.header.workers
        if self._is_source(round):
            if not all_are_in or self.leader is not None:
                assert round.hyper is not None
                self._send({"kind": "hyper", "round": round.number, "hyper": _described(round.hyper)})
        elif round.hyper is None or self.leader is not None:
            self.wait_for(lambda: round.number in self._hypers)
            with self.changed:
                told = self._hypers.pop(round.number)
            own = round.hyper or self._steps.hyper()
            round.hyper = None if told is None else [{**one, **its} for one, its in zip(own, told, strict=True)]
        return round.hyper

    def _check_stamps(self, round: Round) -> None:
        """Refuse to go on with hyperparameters that differ: the parameters would, too, from then on."""
        stamps = {worker: stamp for worker, stamp in enumerate(round.stamps) if stamp}
        if len(set(stamps.values())) > 1:
            first = min(stamps)
            other = next(worker for worker in sorted(stamps) if stamps[worker] != stamps[first])
            raise QuorateError(
                f"process {other} made its last step with other hyperparameters than process {first}, so their "
                "parameters differ from now on: set learning rates and the like at the same update in every process "
                "(schedulers that step by epochs need the same number of batches everywhere)"
            )

    def _joined_for(self, round: Round) -> dict[int, Tensor] | None:
        return self._joined if self.delay else None


def _described(hyper: Hyper) -> list[dict[str, Any]]:
    return [{key: describe(value) for key, value in group.items()} for group in hyper]


def _stamp_of(hyper: Hyper) -> int:
    """A number from 1 to 250, which any float type holds exactly, that stands for hyperparameters."""
    return 1 + zlib.crc32(json.dumps(_described(hyper), default=repr).encode()) % 250
