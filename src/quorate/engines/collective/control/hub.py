"""Worker 0's end of the control plane: hears every process, tells every process, notices who is gone."""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from quorate.engines.collective.control.addresses import Meeting, listen
from quorate.engines.collective.control.connection import Connection, keep_from_children
from quorate.engines.collective.control.wire import (
    LIMIT_BYTES,
    STRANGERS_LIMIT_BYTES,
    Message,
    NoMessage,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: When it was received (time.monotonic), from which worker, and what.
Inbox: TypeAlias = "SimpleQueue[tuple[float, int, Message]]"

BEAT_S = 1.0
BEAT = {"kind": "beat"}
#: The last word of either side: that the connection ends after it is meant.
BYE = {"kind": "bye"}
#: How long processes may take to come here: they may have other things to do before they wrap their model.
ARRIVAL_S = 300.0
#: Kinds that are for the processes, not for worker 0: they are passed on to all.
_PASSED_ON = ("hyper",)
#: What one process says to all others.
RELAYED = ("hyper", "digest", "entering", "ended")
_INTRODUCTION_S = 10.0  # how long somebody may stay without showing the token
_LAST_WORDS_S = 5.0


@dataclass(eq=False)
class _Guest:
    """A connection, and whose it is once the token was shown."""

    connection: Connection
    worker: int | None = None
    who: str = ""
    has_finished: bool = False
    has_said_goodbye: bool = False
    came_at: float = field(default_factory=monotonic)


class Hub:
    """Listens for the processes of one run; one thread serves all of them.

    on_lost: called once, in that thread, with the first worker that was lost and what happened to it.
    patience_s: how long a process may be silent. Every process says every second that it is there.
    arrival_s: how long processes may take to connect.

    What processes say stands in `inbox`, and so does a loss: {"kind": "lost", "why": …}. What they say to each other
    ("hyper") is passed on to all.
    """

    def __init__(
        self,
        workers: int,
        on_lost: Callable[[int, str], None] | None = None,
        *,
        patience_s: float = 60.0,
        arrival_s: float = ARRIVAL_S,
    ) -> None:
        self.workers = workers
        self.inbox: Inbox = SimpleQueue()
        self._on_lost = on_lost
        self._patience_s, self._arrival_s = patience_s, arrival_s
        self._beat_s = min(BEAT_S, patience_s / 4)
        self._lock = threading.Lock()  # of what threads that speak look at, too
        self._guests: dict[int, _Guest] = {}  # by worker
        self._unsaid: dict[int, list[Message]] = {worker: [] for worker in range(workers)}  # to those not here yet
        self._unsent: set[_Guest] = set()  # those whom the system did not take all for
        self._has_lost = False
        self._strangers: set[_Guest] = set()  # they have not shown the token
        self._close_by: float | None = None
        self._listener, addresses = listen()
        self._meeting = Meeting(addresses, self._listener.getsockname()[1])
        self._wake_up, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._woken, self._wake_up):
            keep_from_children(sock).setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._opened_at = monotonic()
        self._thread = threading.Thread(target=self._serve, name="quorate-hub", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for whoever has the hub

    def publish(self, store: Store) -> None:
        """Let the links know where to connect."""
        self._meeting.publish(store)

    def tell(self, worker: int, message: Message) -> None:
        """Send to one worker, without waiting. One that is not here yet gets it when it comes."""
        with self._lock:
            guest = self._guests.get(worker)
            if guest is None:
                if worker in self._unsaid:
                    self._unsaid[worker].append(message)
                return
            if not guest.connection.send(message):
                return
            self._unsent.add(guest)
        self._wake()

    def broadcast(self, message: Message) -> None:
        """Send to every worker, without waiting."""
        for worker in range(self.workers):
            self.tell(worker, message)

    def lose(self, worker: int, why: str) -> None:
        """The run ends for everybody because of this worker. Only the first loss counts: others follow from it."""
        with self._lock:
            if self._has_lost or self._close_by is not None:
                return
            self._has_lost = True
        self.inbox.put((monotonic(), worker, {"kind": "lost", "why": why}))
        self.broadcast({"kind": "lost", "worker": worker, "why": why})
        if self._on_lost is not None:
            self._on_lost(worker, why)

    def close(self, wait_s: float = _LAST_WORDS_S) -> None:
        """End all connections, once every process has finished or gone, or this time is over; safe to call twice."""
        with self._lock:
            if self._close_by is None:
                self._close_by = monotonic() + wait_s
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        beat_at = monotonic()
        try:
            while not self._is_done():
                before = monotonic()
                for key, mask in self._selector.select(max(0.0, min(beat_at - before, self._beat_s))):
                    self._attend(key, mask)
                self._watch_unsent()
                if monotonic() >= beat_at:
                    self._beat()
                    beat_at = monotonic() + self._beat_s
                # What had come by `before` has been read by now. So a process that was itself asleep meanwhile, with
                # its machine or by a signal, does not take the others for silent.
                self._look_for_silence(before)
        finally:
            self.broadcast(BYE)
            for guest in (*self._strangers, *self._guests.values()):
                self._part(guest)
            self._selector.close()
            for sock in (self._listener, self._woken, self._wake_up):
                sock.close()

    def _beat(self) -> None:
        for worker in list(self._guests):
            self.tell(worker, BEAT)

    def _is_done(self) -> bool:
        if self._close_by is None:
            return False
        return monotonic() >= self._close_by or all(guest.has_finished for guest in self._guests.values())

    def _attend(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listener:
            self._welcome()
        elif key.fileobj is self._woken:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        else:
            if mask & selectors.EVENT_WRITE and not key.data.connection.flush():
                self._selector.modify(key.data.connection.sock, selectors.EVENT_READ, key.data)
            if mask & selectors.EVENT_READ:
                self._hear(key.data)

    def _welcome(self) -> None:
        with suppress(OSError):  # gone again already, or no descriptor is left for it
            sock, _ = self._listener.accept()
            guest = _Guest(Connection(sock, STRANGERS_LIMIT_BYTES))
            self._strangers.add(guest)
            self._selector.register(sock, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        try:
            messages = guest.connection.receive()
        except NoMessage as error:
            self._gone(guest, f"{guest.who} sent what is no control message ({error})")
            return
        if messages is None:
            self._gone(guest, f"{guest.who} died")
            return
        for message in messages:
            if guest.worker is None:
                if not self._introduce(guest, message):
                    self._gone(guest, "")
                    return
            elif message["kind"] == "bye":
                guest.has_said_goodbye = True
            elif message["kind"] in _PASSED_ON:
                self.broadcast(message)
            elif message["kind"] != "beat":
                guest.has_finished |= message["kind"] == "finished"
                if message["kind"] in RELAYED:
                    self.broadcast({**message, "worker": guest.worker})
                else:
                    self.inbox.put((guest.connection.heard_at, guest.worker, message))

    def _introduce(self, guest: _Guest, hello: Message) -> bool:
        """Let somebody in who has the token and a place that is free."""
        worker, token = hello.get("worker"), hello.get("token")
        if hello["kind"] != "hello" or not isinstance(token, str) or type(worker) is not int:
            return False
        if not hmac.compare_digest(token.encode(), self._meeting.token.encode()):
            return False
        with self._lock:
            if worker not in self._unsaid:  # no worker of this run, or here already
                return False
            guest.worker, guest.who = worker, f"worker {worker} (pid {hello.get('pid')} on {hello.get('host')})"
            guest.connection.unpacker.limit_bytes = LIMIT_BYTES
            self._strangers.discard(guest)
            self._guests[worker] = guest
            for message in ({"kind": "welcome"}, *self._unsaid.pop(worker)):
                if guest.connection.send(message):
                    self._unsent.add(guest)
        return True

    def _gone(self, guest: _Guest, why: str) -> None:
        self._part(guest)
        if guest.worker is not None and not guest.has_said_goodbye:
            self.lose(guest.worker, why)

    def _part(self, guest: _Guest) -> None:
        with self._lock:
            self._unsent.discard(guest)
            self._strangers.discard(guest)
            if guest.worker is not None:
                self._guests.pop(guest.worker, None)
        self._selector.unregister(guest.connection.sock)
        guest.connection.close()

    def _watch_unsent(self) -> None:
        with self._lock:
            waiting, self._unsent = self._unsent, set()
        for guest in waiting:
            self._selector.modify(guest.connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, guest)

    def _look_for_silence(self, now: float) -> None:
        for stranger in [one for one in self._strangers if now - one.came_at > _INTRODUCTION_S]:
            self._part(stranger)
        for guest in list(self._guests.values()):
            if now - guest.connection.heard_at > self._patience_s:
                self._gone(guest, f"{guest.who} has been silent for {self._patience_s:g} s")
        if self._unsaid and now - self._opened_at > self._arrival_s:
            late = min(self._unsaid)
            self.lose(late, f"worker {late} has not connected to worker 0 within {self._arrival_s:g} s")

    def _wake(self) -> None:
        with suppress(OSError):  # it is awake as it is, or over
            self._wake_up.send(b"!")
