"""Each process's connection to worker 0, and the hang warning that uses it."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from quorate.checkpoint_schedule import warn
from quorate.data_parallel.control.addresses import connect, read_hub_address
from quorate.data_parallel.control.hub import ARRIVAL_S, BEAT, BEAT_S, BYE
from quorate.data_parallel.control.wire import Connection, Message, NoMessage, WakeUp
from quorate.errors import ProcessLost, QuorateError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_CLOSE_S = 2.0
#: Seconds that a process waits in one quorate call before it asks the others for their state.
LONG_S = 30.0

#: The call in which the script's thread waits, and since when (time.monotonic); None if it does not wait.
Waits = Callable[[], tuple[str, float] | None]
_REMEDY = "no further version can be made; start again, or let torchrun do so (--max-restarts) from a checkpoint"


class Link:
    """Connects to worker 0 when it is constructed; its own thread receives the messages.

    on_message: called in that thread with each message except heartbeats; it must not block.
    on_failure: called in that thread, at most once: a process is lost, and with it the run.
    patience_s: silence after which worker 0 counts as lost.
    arrival_s: time for worker 0 to publish its address.
    """

    def __init__(
        self,
        worker: int,
        store: Store,
        on_message: Callable[[Message], None],
        on_failure: Callable[[QuorateError], None],
        patience_s: float = 60.0,
        *,
        arrival_s: float = ARRIVAL_S,
    ) -> None:
        self.worker = worker
        self._on_message, self._on_failure = on_message, on_failure
        self._patience_s = patience_s
        self._beat_s = min(BEAT_S, patience_s / 4)
        #: Called in the link's thread about once a second.
        self.on_beat: Callable[[], None] | None = None
        self._has_finished = False
        self._may_end = False  # the run is over for this process: a closed connection is not a failure
        self._close_by: float | None = None
        self._has_said_goodbye = False
        self._address = read_hub_address(store, arrival_s)
        self._connection = Connection(connect(self._address, worker))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._connection.sock, selectors.EVENT_READ)
        self._wake_up = WakeUp(self._selector)
        try:
            first = self._introduce()
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._listen, args=(first,), name=f"quorate-link-{worker}", daemon=True)
        self._thread.start()

    @property
    def _hub(self) -> str:
        return f"worker 0 (pid {self._address.pid} on {self._address.host})"

    def _introduce(self) -> list[Message]:
        """Show the token and wait for the welcome; returns the messages that came after it."""
        here = {"worker": self.worker, "pid": os.getpid(), "host": socket.gethostname()}
        self._connection.send({"kind": "hello", **here, "token": self._address.token})
        until = monotonic() + self._patience_s
        while (left_s := until - monotonic()) > 0:
            self._selector.select(left_s)
            try:
                messages = self._connection.receive()
            except NoMessage as error:
                raise ProcessLost(f"what answers at the address of {self._hub} is not it ({error})") from None
            if messages is None:
                raise ProcessLost(f"{self._hub} turned worker {self.worker} away: its place is taken, or all is over")
            if messages:
                return messages[1:]  # the first is the welcome
        raise ProcessLost(f"{self._hub} does not answer")

    def send(self, kind: str, **fields: Any) -> None:
        """Send to worker 0 from any thread, without waiting."""
        self._has_finished |= kind == "finished"
        if self._connection.send({"kind": kind, **fields}):
            self._wake_up.wake()

    def close(self) -> None:
        """Close the connection. Unless this process has sent `finished`, it then counts as lost."""
        if self._close_by is None:
            self._may_end = True
            if self._has_finished:
                self._connection.send(BYE)
            self._close_by = monotonic() + _CLOSE_S
        self._wake_up.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _listen(self, first: list[Message]) -> None:
        try:
            failure = self._take_in(first)
            beat_at = monotonic()
            while failure is None and not self._is_done():
                before = monotonic()
                failure = self._attend(max(0.0, min(beat_at, self._close_by or beat_at) - before))
                if monotonic() >= beat_at:
                    if not self._has_said_goodbye:
                        self._connection.send(BEAT)
                    if self.on_beat is not None:
                        self.on_beat()
                    beat_at = monotonic() + self._beat_s
                # Every message that arrived by `before` has been read, so a suspended process reports no silence.
                if failure is None and before - self._connection.heard_at > self._patience_s:
                    failure = ProcessLost(f"{self._hub} has been silent for {self._patience_s:g} s: {_REMEDY}")
            if failure is not None and not self._may_end:
                self._may_end = True
                self._on_failure(failure)
        except Exception as error:  # from on_message or on_beat: threads that wait for messages must know
            wrong = error if isinstance(error, QuorateError) else QuorateError(f"a control message led to {error!r}")
            wrong.__cause__ = error if wrong is not error else None
            self._on_failure(wrong)
        finally:
            self._release()

    def _is_done(self) -> bool:
        """Whether this side has closed, and the other side has had time to close, too."""
        if self._close_by is None:
            return False
        if not self._has_said_goodbye and not self._connection.has_unsent:
            self._has_said_goodbye = True
            self._connection.end_sending()
        return monotonic() >= self._close_by

    def _attend(self, timeout_s: float) -> QuorateError | None:
        """Wait for messages and handle them; returns the failure that ends the connection, if there is one."""
        connection = self._connection
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        self._selector.modify(connection.sock, events)
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._wake_up.receiver:
                self._wake_up.drain()
                continue
            if mask & selectors.EVENT_WRITE:
                connection.flush()
            if not mask & selectors.EVENT_READ:
                continue
            try:
                messages = connection.receive()
            except NoMessage as error:
                return ProcessLost(f"{self._hub} sent what is no control message ({error})")
            if messages is None:
                return ProcessLost(f"{self._hub} died: {_REMEDY}")
            return self._take_in(messages)
        return None

    def _take_in(self, messages: list[Message]) -> QuorateError | None:
        for message in messages:
            kind = message["kind"]
            if kind == "lost":
                return ProcessLost(f"{message['why']}: {_REMEDY}")
            if kind in ("over", "bye"):
                self._may_end = True
            if kind not in ("beat", "bye"):
                self._on_message(message)
        return None

    def _release(self) -> None:
        self._on_message, self._on_failure = (lambda _: None), (lambda _: None)  # so that the model can be freed
        self.on_beat = None
        self._selector.close()
        self._connection.close()
        self._wake_up.close()


class HangWarning:
    """Asks all processes for their state when this one has waited for `limit_s`, and warns if none of them computes.

    A process computes if it began an iteration within `limit_s`, or within three times its longest iteration.
    The link's thread calls `beat` about once a second, and `heard` with each message.
    """

    def __init__(self, worker: int, workers: int, waits: Waits, send: Callable[..., None], limit_s: float) -> None:
        self._worker, self._waits, self._send, self._limit_s = worker, waits, send, limit_s
        self._others = [other for other in range(workers) if other != worker]
        self._began_at, self._longest_s = monotonic(), 0.0
        self._asked_at = 0.0
        self._answers: dict[int, dict[str, Any]] | None = None  # None: no question is open
        self._warned_for = 0.0  # start of the wait of the last warning

    def began(self) -> None:
        """The script has begun an iteration."""
        self._began_at = monotonic()

    def ended(self) -> None:
        """The script has ended its iteration."""
        self._longest_s = max(self._longest_s, monotonic() - self._began_at)

    def beat(self) -> None:
        """If this process waits for long, ask the other processes, or evaluate their answers."""
        waits, now = self._waits(), monotonic()
        if waits is None or now - waits[1] < self._limit_s or waits[1] == self._warned_for:
            self._answers = None
        elif self._answers is None or now - self._asked_at >= self._limit_s:
            self._answers, self._asked_at = {}, now
            self._send("stalled")
        elif len(self._answers) == len(self._others):
            self._evaluate(*waits, self._answers)

    def heard(self, message: dict[str, Any]) -> None:
        """Answer a question, or note an answer."""
        if message["kind"] == "stalled" and message["worker"] != self._worker:
            waits, idle_s = self._waits(), monotonic() - self._began_at
            computes = idle_s < max(self._limit_s, 3 * self._longest_s)
            where = None if waits is None else waits[0]
            self._send("doing", to=message["worker"], where=where, idle_s=idle_s, computes=computes)
        elif message["kind"] == "doing" and message["to"] == self._worker and self._answers is not None:
            self._answers[message["worker"]] = message

    def _evaluate(self, where: str, since: float, answers: dict[int, dict[str, Any]]) -> None:
        if any(answer["computes"] and answer["where"] is None for answer in answers.values()):
            return  # that process is only slow; all are asked again later
        away = [worker for worker in self._others if answers[worker]["where"] is None]
        waiting = [
            f"rank {worker} waits in {answers[worker]['where']}" for worker in self._others if worker not in away
        ]
        self._warned_for = since
        wait = f"process {self._worker} has waited {monotonic() - since:.0f} s in {where}, and no process computes: "
        if away:
            many = len(away) > 1
            idle_s = min(answers[worker]["idle_s"] for worker in away)
            waiting.append(
                f"rank{'s' * many} {', '.join(map(str, away))} {'have' if many else 'has'} begun no iteration for "
                f"{idle_s:.0f} s, and probably wait{'s' * (not many)} for the others in a collective of the script "
                "(dist.barrier(), all_reduce, gather, a checkpoint)"
            )
        warn(
            f"{wait}{'; '.join(waiting)}. Call model.meet() in every process before such a collective, and equally "
            "often in all of them; in loops that count use: for step in model.steps(…, meet_every=…)"
        )
