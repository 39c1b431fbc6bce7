"""The data plane of one process: its rounds, the thread that adds them up, and the thread that applies them.

Three threads work on a round. The user's computes gradients and calls `step()`. The communication thread takes part in
every all-reduce. The updating thread applies a bucket's update as soon as its average is there and the update is
released. They meet under one condition (`changed`); nothing that takes long is done while it is held.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from quorate.engines.collective.layout import Layout, Piece
from quorate.engines.collective.marks import Mark, mark, own_stream, wait_for
from quorate.engines.collective.ordering import IN_FLIGHT, Order
from quorate.engines.collective.partial_steps import Hyper, PartialSteps
from quorate.engines.collective.reading import Gate
from quorate.engines.collective.rounds import Round
from quorate.engines.collective.slots import Slot
from quorate.errors import ProcessLost, QuorateError

#: When an all-reduce fails, the control connection usually knows why a moment later.
_WAIT_FOR_THE_REASON_S = 3.0


class Work(Protocol):
    """An all-reduce under way."""

    def wait(self) -> Any: ...


class Group(Protocol):
    """The process group that the gradients travel over."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...


class Plane(ABC):
    """What both kinds of rounds share."""

    def __init__(
        self, layout: Layout, group: Group, worker: int, steps: PartialSteps, *, slots: int, clip_norm: float | None
    ) -> None:
        self.layout, self.worker = layout, worker
        self.gate = Gate(self._wait_to_read)
        for member in layout.bucket_of:
            self.gate.know(layout.tensor(member), layout.bucket_of[member])
        self._group, self._steps, self._clip_norm = group, steps, clip_norm
        self.changed = threading.Condition()
        self.error: QuorateError | None = None
        self.expected = float(layout.header.workers)  # what the gradients of a round usually weigh together
        self.applied_version = 0
        self.waited_s = 0.0  # that the user's thread waited for updates, in all
        #: Called by the updating thread after each version with its number and how long its round took.
        self.on_version: Callable[[int, float], None] | None = None
        #: Called by the communication thread before a round's last piece leaves: until then its version cannot be made.
        self.before_complete: Callable[[], None] = lambda: None
        self._closing = False
        self._free = deque(Slot(layout) for _ in range(slots))
        self._released: deque[Round] = deque()
        self._unreadable: dict[int, Mark] = {}  # bucket -> what to wait for on a GPU; ... while not applied
        self._device = layout.buckets[0].device
        self._joined: dict[int, Tensor] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"quorate-{name}", daemon=True)
            for name, work in (("communicating", self._communicate), ("updating", self._update))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            with own_stream(self._device):
                work()
        except QuorateError as error:
            self.fail(error)
        except Exception as error:
            if self.error is None:  # otherwise this is what comes of it
                self.fail(_explained(error))

    # ------------------------------------------------------------ waiting and failing

    def fail(self, error: QuorateError) -> None:
        """Nothing more can be done here; every thread that waits says so. The first reason counts."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Until this holds, which is asked under `changed`."""
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or holds())
            if self.error is not None:
                self._raise()

    def _raise(self) -> None:
        assert self.error is not None
        raise self.error.with_traceback(None)  # several threads raise it; each has its own way there

    def _take_slot(self) -> Slot:
        with self.changed:  # one look and one hold: two threads take slots
            self.changed.wait_for(lambda: self.error is not None or self._free)
            if self.error is not None:
                self._raise()
            slot = self._free.popleft()
        wait_for(slot.free_mark)
        return slot

    def _give_slot(self, slot: Slot) -> None:
        """A slot is free; under `changed`."""
        slot.free_mark = mark(self._device)  # what this thread has queued on a GPU still reads it
        self._free.append(slot)
        self.changed.notify_all()

    def _new_round(self, number: int, weight: float) -> Round:
        return Round(number, self._take_slot(), self.layout, self.worker, weight, self.expected)

    def fill_up(self, round: Round, gradient_of: Callable[[int], Tensor | None]) -> None:
        """Complete a round with whatever is not in it yet."""
        for member in round.unfilled():
            round.fill(member, gradient_of(member))
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------ the communication thread

    @abstractmethod
    def _communicate(self) -> None:
        """Take part in every round."""

    def _exchange(self, round: Round, order: Order) -> None:
        """Add up a round's gradients over all workers, piece by piece."""
        flight: deque[tuple[Piece, Work]] = deque()
        heard: deque[list[float]] = deque()
        while order.left:
            if len(flight) == IN_FLIGHT:
                heard.append(self._land(round, *flight.popleft()))
            if len(heard) and len(flight) + len(heard) >= IN_FLIGHT:
                # Everybody hears of a piece at the same place in the order, whenever it really came back.
                order.heard(heard.popleft())
            piece = order.next()
            # As it is before waiting: if that piece was chosen too early, the next round is to know.
            ready = list(round.ready)
            while flight and not round.ready[piece.bucket]:
                heard.append(self._land(round, *flight.popleft()))
            self.wait_for(lambda: round.ready[piece.bucket])  # noqa: B023 - it is called at once
            if not order.left:
                self.before_complete()
            flight.append((piece, self._group.allreduce([round.leave(piece, ready)])))
        while flight:
            heard.append(self._land(round, *flight.popleft()))
        for not_ready in heard:  # too late for this round; the next one learns from it
            order.heard(not_ready)

    def _land(self, round: Round, piece: Piece, work: Work) -> list[float]:
        work.wait()
        not_ready, complete = round.back(piece)
        if complete:
            with self.changed:
                round.averaged[piece.bucket] = True
                self.changed.notify_all()
        return not_ready

    # ------------------------------------------------------------ the updating thread

    def _release(self, round: Round) -> None:
        """Let a round's update be applied; whoever reads a parameter waits for it from now on."""
        round.release_mark = mark(self._device)  # after everything that this thread still reads
        with self.changed:
            round.released = True
            self._released.append(round)
            self._close_gate(round)
            self.changed.notify_all()

    def _closes_gate(self, round: Round) -> bool:
        return True

    def _close_gate(self, round: Round) -> None:
        for bucket in range(len(self.layout.buckets)):
            self._unreadable[bucket] = ...
        self.gate.closed = True

    def _update(self) -> None:
        while True:
            self.wait_for(lambda: self._released or self._closing)
            if not self._released:
                return
            self._update_once()

    def _update_once(self) -> None:
        round = self._released[0]
        began = time.monotonic()
        wait_for(round.release_mark)
        self._apply(round)
        is_version = round.total > 0 and not round.is_void
        with self.changed:
            self._released.popleft()
            self._give_slot(round.slot)
            if is_version:
                self.applied_version += 1
            self.changed.notify_all()
        if self.on_version is not None and is_version:
            self.on_version(self.applied_version, time.monotonic() - began)

    def _apply(self, round: Round) -> None:
        """Apply every bucket of a round as it comes back."""
        numbers = set(range(len(self.layout.buckets)))
        hyper, scale = None, 1.0
        if self._clip_norm is not None:
            self.wait_for(lambda: all(round.averaged))
            if round.total > 0:
                scale = self._clipping(round)
        while numbers:
            self.wait_for(lambda: any(round.averaged[number] for number in numbers))
            for number in [number for number in numbers if round.averaged[number]]:
                numbers.remove(number)
                if round.total > 0 and not round.is_void:
                    hyper = hyper or self._hyper_of(round)
                    round.is_void = hyper is None
                    if hyper is not None:
                        self._apply_bucket(round, number, hyper, scale)
                self._open_gate(round, number)

    def _hyper_of(self, round: Round) -> Hyper | None:
        """The hyperparameters to apply a round with; None: it is not to be applied."""
        return round.hyper

    def _clipping(self, round: Round) -> float:
        """By what to multiply the average so that its norm over all parameters is at most `clip_norm`."""
        assert self._clip_norm is not None
        squares = [
            average.double().square().sum()
            for bucket in self.layout.buckets
            if not bucket.holds_buffers
            for average in round.averages(bucket.number).values()
        ]
        norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
        return min(1.0, self._clip_norm / (norm + 1e-6))

    def _apply_bucket(self, round: Round, number: int, hyper: Hyper, scale: float) -> None:
        averages = round.averages(number, self._joined_for(round))
        if self.layout.buckets[number].holds_buffers:
            with torch.no_grad():
                for member, average in averages.items():
                    self._set_buffer(round, member, average)
            return
        if scale != 1.0:
            for average in averages.values():
                average.mul_(scale)
        gradients = {self.layout.tensor(member): average for member, average in averages.items()}
        self._steps.apply(gradients, hyper, self._instead())

    def newest(self) -> dict[Tensor, Tensor]:
        """The newest version of each parameter; only in the updating thread."""
        instead = self._instead()
        return {one: one.detach() if instead is None else instead[one] for one in self.layout.parameters}

    def newest_buffers(self) -> dict[Tensor, Tensor]:
        """Buffers whose newest averages are elsewhere; only in the updating thread."""
        return {}

    def _joined_for(self, round: Round) -> dict[int, Tensor] | None:
        return self._joined

    def _instead(self) -> dict[Tensor, Tensor] | None:
        """Other tensors to update in place of the parameters."""
        return None

    def _set_buffer(self, round: Round, member: int, average: Tensor) -> None:
        buffer = self.layout.tensor(member)
        buffer.detach().copy_(average if buffer.dtype.is_floating_point else average.round())

    # ------------------------------------------------------------ reading

    def _open_gate(self, round: Round | None, number: int) -> None:
        point = mark(self._device)
        with self.changed:
            if round is not None:
                round.applied[number] = True
            if any(not one.applied[number] for one in self._released if one is not round and self._closes_gate(one)):
                pass  # another update of it is released
            elif point is None:
                self._unreadable.pop(number, None)
            else:
                self._unreadable[number] = point  # the reader's own work must still be queued behind it
            self.gate.closed = bool(self._unreadable)
            self.changed.notify_all()

    def wait_until_readable(self, numbers: Iterable[int]) -> None:
        """Until the updates of these buckets that are released are applied."""
        for number in numbers:
            if number not in self._unreadable:
                continue
            began = time.monotonic()
            self.wait_for(lambda: self._unreadable.get(number) is not ...)  # noqa: B023 - it is called at once
            with self.changed:
                wait_for(self._unreadable.pop(number, None))
                self.gate.closed = bool(self._unreadable)
            self.waited_s += time.monotonic() - began

    def _wait_to_read(self, numbers: Iterable[int]) -> None:
        if not self._is_one_of_ours():
            self.wait_until_readable(numbers)

    def _is_one_of_ours(self) -> bool:
        """Whether this thread makes the versions: it must not wait for the next one while it saves the last."""
        return threading.current_thread() in self._threads

    def synchronize(self) -> None:
        """Until every released update is applied."""
        if self._is_one_of_ours():
            return
        self.wait_until_readable(range(len(self.layout.buckets)))
        self.wait_for(lambda: not self._released)

    def wait_for_threads(self, limit_s: float) -> bool:
        """After a failure: whether the threads have ended within so long."""
        end = time.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self) -> None:
        """Let the threads end once there is nothing left to do."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)


def _explained(error: Exception) -> QuorateError:
    """A failed all-reduce nearly always means that a process is gone."""
    if isinstance(error, RuntimeError):
        time.sleep(_WAIT_FOR_THE_REASON_S)  # whoever knows more has failed first by then
        lost = ProcessLost(f"an all-reduce failed, so another process is probably gone: {error}")
        lost.__cause__ = error
        return lost
    wrong = QuorateError(f"the collective engine failed: {error!r}")
    wrong.__cause__ = error
    return wrong
