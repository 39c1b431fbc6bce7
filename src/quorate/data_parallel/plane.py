"""The data plane of one process: its rounds, its communication thread and its updating thread.

Three threads work on a round. The user's thread computes gradients and calls `step()`. The communication thread takes
part in every all-reduce. The updating thread applies a bucket's update as soon as its average is there and the update
is released. All three synchronize on one condition (`changed`) and hold it only for short operations.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from quorate.data_parallel.buckets import IN_FLIGHT, BucketLayout, Event, Piece, PieceOrder, RoundBuffers
from quorate.data_parallel.lazy_tensors import Gate
from quorate.data_parallel.optimizer_steps import Hyper, PartialSteps
from quorate.errors import ProcessLost, QuorateError


class Round:
    """The state of a round in this process. Its lists are indexed by bucket.

    weight: the weight of this process's gradient; 0: it takes part without one.
    expected: the usual total weight. Gradients are divided by it before they are sent, so that their sum needs no
        further scaling if the total is as expected.
    """

    def __init__(
        self, number: int, slot: RoundBuffers, layout: BucketLayout, worker: int, weight: float, expected: float = 1.0
    ) -> None:
        self.number, self.slot, self.weight, self._expected = number, slot, weight, expected
        self._layout, self._worker = layout, worker
        count = len(layout.buckets)
        self.ready = [False] * count
        self.averaged = [False] * count
        self.applied = [False] * count
        self.hyper: Hyper | None = None  # as they were at step(); None: a contributor sends them
        self.released = False  # the update may be applied
        self.release_event: Event = None
        self.is_void = False  # the contributors gave the round up, so there is no update
        self.checksum = 0  # of the hyperparameters of this process's previous step
        self.weights: list[float] = []  # by worker, once the first piece is summed
        self.checksums: list[float] = []  # likewise
        self.sent: dict[int, Tensor] = {}  # changes of buffers as sent; with a delay, buffers change again meanwhile
        self._filled: set[int] = set()
        self._missing = [len(bucket.members) for bucket in layout.buckets]
        self._used: set[int] = set()  # members for which a worker has a gradient
        self._pieces_back = [0] * count
        self._ready_events: list[Event] = [None] * count
        self._sum_events: list[Event] = [None] * count
        self._averages: dict[int, dict[int, Tensor]] = {}
        self._averaging = threading.Lock()

    def fill(self, member: int, gradient: Tensor | None) -> bool:
        """Store a gradient, or None for no gradient; returns whether its bucket is complete now."""
        if member in self._filled:
            return False
        self._filled.add(member)
        if gradient is None:
            self.slot.clear(member)
        else:
            self.slot.fill(member, gradient, self.weight / self._expected)
            self._used.add(member)
        number = self._layout.bucket_of[member]
        self._missing[number] -= 1
        if self._missing[number]:
            return False
        self._ready_events[number] = record_event(self._layout.buckets[number].device)
        self.ready[number] = True
        return True

    def unfilled(self) -> list[int]:
        return [member for bucket in self._layout.buckets for member in bucket.members if member not in self._filled]

    def leave(self, piece: Piece, ready: list[bool] | None = None) -> Tensor:
        """The payload of a piece. ready: by bucket, the readiness to report (default: the current one)."""
        wait_event(self._ready_events[piece.bucket])
        used = [member in self._used for member in self._layout.buckets[piece.bucket].members]
        numbers = self._layout.header.numbers(self._worker, self.weight, self.checksum, ready or self.ready, used)
        header = self.slot.header(piece)
        header.copy_(header.new_tensor(numbers))
        return self.slot.payload(piece)

    def back(self, piece: Piece) -> tuple[list[float], bool]:
        """A piece is summed; returns by bucket how many workers were not ready, and whether its bucket is complete."""
        sums = self._layout.header.sums(self.slot.header(piece).tolist())  # On a GPU this waits for the sums.
        if not self.weights:
            self.weights, self.checksums = sums.weights, sums.checksums
        bucket = self._layout.buckets[piece.bucket]
        self._used.update(member for member, count in zip(bucket.members, sums.used, strict=True) if count > 0)
        self._pieces_back[piece.bucket] += 1
        complete = self._pieces_back[piece.bucket] == len(bucket.pieces)
        if complete:
            self._sum_events[piece.bucket] = record_event(bucket.device)
        return sums.not_ready, complete

    @property
    def total(self) -> float:
        """The weight of all gradients together; 0: no worker contributed."""
        return sum(self.weights)

    def contributors(self) -> list[int]:
        return [worker for worker, weight in enumerate(self.weights) if weight > 0]

    def averages(self, number: int, into: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """The averages of a bucket by member, made on the first call; only members with a gradient in some worker."""
        with self._averaging:
            wait_event(self._sum_events[number])
            if number not in self._averages:
                averages = self.slot.average(self._layout.buckets[number], self._expected / self.total, into)
                self._averages[number] = {member: one for member, one in averages.items() if member in self._used}
            return self._averages[number]


#: When an all-reduce fails, the control connection usually knows the reason a moment later.
_WAIT_FOR_THE_REASON_S = 3.0


class AllReduce(Protocol):
    """An all-reduce that has been started."""

    def wait(self) -> Any: ...


class Transport(Protocol):
    """The process group that sums the gradients."""

    def allreduce(self, tensors: list[Tensor]) -> AllReduce: ...


class Plane(ABC):
    """The parts of the data plane that full sync and quorums share."""

    def __init__(
        self,
        layout: BucketLayout,
        group: Transport,
        worker: int,
        steps: PartialSteps,
        *,
        slots: int,
        clip_norm: float | None,
    ) -> None:
        self.layout, self.worker = layout, worker
        self.gate = Gate(self._wait_to_read)
        for member in layout.bucket_of:
            self.gate.know(layout.tensor(member), layout.bucket_of[member])
        self._group, self._steps, self._clip_norm = group, steps, clip_norm
        self.changed = threading.Condition()
        self.error: QuorateError | None = None
        self.expected = float(layout.header.workers)  # the usual total weight of a round
        self.applied_version = 0
        self.waits_since: float | None = None  # when the user's thread began to wait; None: it does not wait
        self.waited_s = 0.0  # total time that the user's thread has waited for updates
        #: Called by the updating thread after each version with its number and the seconds its round took.
        self.on_version: list[Callable[[int, float], None]] = []
        #: Called by the communication thread before it sends a round's last piece: no version can be made before.
        self.before_complete: Callable[[], None] = lambda: None
        #: Values of buffers at the applied version, where the model's own buffers differ from them.
        self.agreed_buffers: dict[Tensor, Tensor] = {}
        self._closing = False
        self._free = deque(RoundBuffers(layout) for _ in range(slots))
        self._released: deque[Round] = deque()
        self._unreadable: dict[int, Event] = {}  # by bucket, the event to wait for on a GPU; `...` until applied
        self._device = layout.buckets[0].device
        #: Memory for averages that all rounds share; None: each round uses its own.
        self._joined: dict[int, Tensor] | None = {}
        #: By parameter, the tensor to update in its place; None: the parameters themselves are updated.
        self._shadow: dict[Tensor, Tensor] | None = None
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
            if self.error is None:  # Otherwise this error only follows from the first one.
                self.fail(_explained(error))

    # ------------------------------------------------------------ waiting and failing

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold `changed`, and wake all waiting threads at the end."""
        with self.changed:
            yield
            self.changed.notify_all()

    def fail(self, error: QuorateError) -> None:
        """Stop the data plane: every waiting thread raises the first error."""
        with self.changing():
            if self.error is None:
                self.error = error

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Wait until the predicate holds, which is called under `changed`."""
        with self.changed:
            if not self._is_plane_thread():
                self.waits_since = time.monotonic()
            self.changed.wait_for(lambda: self.error is not None or holds())
            if not self._is_plane_thread():
                self.waits_since = None
            if self.error is not None:
                self._raise()

    def _raise(self) -> None:
        assert self.error is not None
        raise self.error.with_traceback(None)  # Several threads raise this error, each with its own traceback.

    def _new_round(self, number: int, weight: float) -> Round:
        """A round with free buffers; waits for them."""
        with self.changed:  # Check and take under one lock: two threads take buffers.
            self.changed.wait_for(lambda: self.error is not None or self._free)
            if self.error is not None:
                self._raise()
            slot = self._free.popleft()
        wait_event(slot.free_event)
        return Round(number, slot, self.layout, self.worker, weight, self.expected)

    def _give_slot(self, slot: RoundBuffers) -> None:
        """Return a round's buffers; the caller holds `changed`."""
        slot.free_event = record_event(self._device)  # Work that this thread has queued on a GPU still reads them.
        self._free.append(slot)
        self.changed.notify_all()

    def fill_up(self, round: Round, gradient_of: Callable[[int], Tensor | None]) -> None:
        """Complete a round with the gradients that it still lacks."""
        for member in round.unfilled():
            round.fill(member, gradient_of(member))
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------ the communication thread

    @abstractmethod
    def _communicate(self) -> None:
        """Take part in every round."""

    def _exchange(self, round: Round, order: PieceOrder) -> None:
        """Sum a round's gradients over all workers, piece by piece."""
        flight: deque[tuple[Piece, AllReduce]] = deque()
        heard: deque[list[float]] = deque()
        while order.left:
            if len(flight) == IN_FLIGHT:
                heard.append(self._land(round, *flight.popleft()))
            if len(heard) and len(flight) + len(heard) >= IN_FLIGHT:
                # All workers use a piece's sums at the same place in the order, even if they had them earlier.
                order.heard(heard.popleft())
            piece = order.next()
            # Report the readiness from before the wait: if this piece was chosen too early, the next round learns it.
            ready = list(round.ready)
            while flight and not round.ready[piece.bucket]:
                heard.append(self._land(round, *flight.popleft()))
            self.wait_for(lambda: round.ready[piece.bucket])  # noqa: B023 - called at once
            if not order.left:
                self.before_complete()
            flight.append((piece, self._group.allreduce([round.leave(piece, ready)])))
        while flight:
            heard.append(self._land(round, *flight.popleft()))
        for not_ready in heard:  # Too late for this round, but the next round uses these sums.
            order.heard(not_ready)

    def _land(self, round: Round, piece: Piece, work: AllReduce) -> list[float]:
        work.wait()
        not_ready, complete = round.back(piece)
        if complete:
            with self.changed:
                round.averaged[piece.bucket] = True
                self.changed.notify_all()
        return not_ready

    # ------------------------------------------------------------ the updating thread

    def _release(self, round: Round) -> None:
        """Let a round's update be applied; from now on reads of a parameter wait for it."""
        round.release_event = record_event(self._device)  # Reads that this thread has queued come before the update.
        with self.changing():
            round.released = True
            self._released.append(round)
            if self._closes_gate(round):
                self._close_gate(round)

    def _closes_gate(self, round: Round) -> bool:
        """Whether reads wait for this round's update."""
        return True

    def _close_gate(self, round: Round) -> None:
        self._unreadable.update(dict.fromkeys(range(len(self.layout.buckets)), ...))
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
        wait_event(round.release_event)
        self._apply(round)
        is_version = round.total > 0 and not round.is_void
        with self.changing():
            self._released.popleft()
            self._give_slot(round.slot)
            if is_version:
                self.applied_version += 1
        if is_version:
            seconds = time.monotonic() - began
            for told in self.on_version:
                told(self.applied_version, seconds)

    def _apply(self, round: Round) -> None:
        """Apply every bucket of a round as soon as it is averaged."""
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
        """The hyperparameters of a round's update; None: the round is void."""
        return round.hyper

    def _clipping(self, round: Round) -> float:
        """The factor that limits the norm of the averaged gradient to `clip_norm`."""
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
        averages = round.averages(number, self._joined)
        if self.layout.buckets[number].holds_buffers:
            with torch.no_grad():
                for member, average in averages.items():
                    self._set_buffer(round, member, average)
            return
        if scale != 1.0:
            for average in averages.values():
                average.mul_(scale)
        gradients = {self.layout.tensor(member): average for member, average in averages.items()}
        self._steps.apply(gradients, hyper, self._shadow)

    def newest(self) -> dict[Tensor, Tensor]:
        """The newest version of each parameter; only for the updating thread."""
        return self._shadow or {parameter: parameter.detach() for parameter in self.layout.parameters}

    def newest_buffers(self) -> dict[Tensor, Tensor]:
        """The newest averages of buffers, where the model's own buffers differ; only for the updating thread."""
        return {}

    def _set_buffer(self, round: Round, member: int, average: Tensor) -> None:
        buffer = self.layout.tensor(member)
        buffer.detach().copy_(average if buffer.dtype.is_floating_point else average.round())

    # ------------------------------------------------------------ reading

    def _open_gate(self, round: Round | None, number: int) -> None:
        event = record_event(self._device)
        with self.changing():
            if round is not None:
                round.applied[number] = True
            if any(not one.applied[number] for one in self._released if one is not round and self._closes_gate(one)):
                pass  # The bucket stays closed: another of its updates is released.
            elif event is None:
                self._unreadable.pop(number, None)
            else:
                self._unreadable[number] = event  # On a GPU a reader must queue its work behind the update.
            self.gate.closed = bool(self._unreadable)

    def wait_until_readable(self, numbers: Iterable[int]) -> None:
        """Wait until the released updates of these buckets are applied."""
        for number in numbers:
            if number not in self._unreadable:
                continue
            began = time.monotonic()
            self.wait_for(lambda: self._unreadable.get(number) is not ...)  # noqa: B023 - called at once
            with self.changed:
                wait_event(self._unreadable.pop(number, None))
                self.gate.closed = bool(self._unreadable)
            self.waited_s += time.monotonic() - began

    def _wait_to_read(self, numbers: Iterable[int]) -> None:
        if not self._is_plane_thread():
            self.wait_until_readable(numbers)

    def _is_plane_thread(self) -> bool:
        """Whether this is a thread of the plane: it must not wait for a version while it saves the one before."""
        return threading.current_thread() in self._threads

    def synchronize(self) -> None:
        """Wait until every released update is applied."""
        if self._is_plane_thread():
            return
        self.wait_until_readable(range(len(self.layout.buckets)))
        self.wait_for(lambda: not self._released)

    def quiesce(self) -> None:
        """Wait until every released update is applied and no all-reduce of this process is running.

        If all processes call this at the same iteration, another thread may use the group.
        """
        self.synchronize()

    def release(self) -> None:
        """After the end: drop the buffers and all reference cycles, so that memory is freed without the collector."""
        for kept in (self._free, self._released, self.agreed_buffers, self.on_version):
            kept.clear()
        self._joined = self._shadow = None
        self.before_complete = lambda: None
        self.gate.closed = False
        self.gate.wait = lambda numbers: None

    def wait_for_threads(self, limit_s: float) -> None:
        """After a failure: wait up to `limit_s` for the threads."""
        end = time.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))

    def _end(self) -> None:
        """Let the threads end after their remaining work."""
        with self.changing():
            self._closing = True
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)


def _explained(error: Exception) -> QuorateError:
    """A failed all-reduce nearly always means that a process is gone."""
    explained = QuorateError(f"the collective engine failed: {error!r}")
    if isinstance(error, RuntimeError):
        time.sleep(_WAIT_FOR_THE_REASON_S)  # By then the control connection has reported the reason, if it knows it.
        explained = ProcessLost(f"an all-reduce failed, so another process is probably gone: {error}")
    explained.__cause__ = error
    return explained


# CUDA events order the work of threads on a GPU, where a call returns when its work is only queued.


def record_event(device: torch.device) -> Event:
    """An event after all work that this thread has queued so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_event(event: Event) -> None:
    """Queue this thread's later work behind the event."""
    if event is not None:
        event.wait()


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has done the queued work of all threads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give this thread a stream of its own, so that its work does not queue behind that of other threads."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
