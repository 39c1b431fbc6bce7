"""Worker 0's end of the control plane: receives from every process, sends to every process, detects lost processes."""

from __future__ import annotations

import hmac
import selectors
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from quorate.data_parallel.control.addresses import HubAddress, listen
from quorate.data_parallel.control.wire import (
    LIMIT_BYTES,
    UNAUTHENTICATED_LIMIT_BYTES,
    Connection,
    Message,
    NoMessage,
    WakeUp,
    keep_from_children,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


#: Time of receipt (time.monotonic), worker, message.
Inbox: TypeAlias = "SimpleQueue[tuple[float, int, Message]]"

BEAT_S = 1.0
BEAT = {"kind": "beat"}
#: The last message of either side: the connection then closes on purpose.
BYE = {"kind": "bye"}
#: Time for all processes to connect. A script may do other work before it wraps its model.
ARRIVAL_S = 300.0
#: Message kinds from one process to all: the hub adds the sender's number and keeps them from the coordinator.
RELAYED = ("hyper", "digest", "entering", "ended", "stalled", "doing")
#: Message kinds from a process to worker 0's coordinator.
_HEARD = ("arrived", "refused", "abandoned", "began", "finished", "meet", "want", "record")
#: Fields that are whole numbers in every message.
_WHOLE = ("version", "round", "total", "epoch", "ask", "steps")
_INTRODUCTION_S = 10.0  # limit for a connection to show the token
_CLOSE_S = 5.0


@dataclass(eq=False)
class _Peer:
    """A connection, and its worker once it has shown the token."""

    connection: Connection
    worker: int | None = None
    name: str = ""
    has_finished: bool = False
    has_said_goodbye: bool = False
    connected_at: float = field(default_factory=monotonic)


class Hub:
    """Listens for the processes of one run; one thread serves all of them.

    patience_s: silence after which a process counts as lost. Every process sends a heartbeat every second.
    arrival_s: time for all processes to connect.

    Messages from processes go into `inbox`, and so does a loss: {"kind": "lost", "why": …}. Messages between
    processes (`RELAYED`) go to all of them.
    """

    def __init__(self, workers: int, *, patience_s: float = 60.0, arrival_s: float = ARRIVAL_S) -> None:
        self.workers = workers
        self.inbox: Inbox = SimpleQueue()
        self._patience_s, self._arrival_s = patience_s, arrival_s
        self._beat_s = min(BEAT_S, patience_s / 4)
        self._lock = threading.Lock()  # guards the state that sending threads use, too
        self._peers: dict[int, _Peer] = {}  # by worker
        self._backlog: dict[int, list[Message]] = {worker: [] for worker in range(workers)}  # of workers not connected
        self._unsent: set[_Peer] = set()  # connections with unsent bytes
        self._has_lost = False
        self._unauthenticated: set[_Peer] = set()  # connections that have not shown the token
        self._close_by: float | None = None
        self._listener, addresses = listen()
        keep_from_children(self._listener).setblocking(False)
        self._address = HubAddress(addresses, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_up = WakeUp(self._selector)
        self._opened_at = monotonic()
        self._thread = threading.Thread(target=self._serve, name="quorate-hub", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for the hub's owner, from any thread

    def publish(self, store: Store) -> None:
        """Publish the hub's address for the links."""
        self._address.publish(store)

    def tell(self, worker: int, message: Message) -> None:
        """Send to one worker without waiting. A worker that has not connected yet gets the message when it does."""
        with self._lock:
            peer = self._peers.get(worker)
            if peer is None:
                if worker in self._backlog:
                    self._backlog[worker].append(message)
                return
            if not peer.connection.send(message):
                return
            self._unsent.add(peer)
        self._wake_up.wake()

    def broadcast(self, message: Message) -> None:
        """Send to every worker without waiting."""
        for worker in range(self.workers):
            self.tell(worker, message)

    def lose(self, worker: int, why: str) -> None:
        """End the run for all processes because of this worker. Only the first loss counts: it causes later ones."""
        with self._lock:
            if self._has_lost:
                return
            self._has_lost = True
        self.inbox.put((monotonic(), worker, {"kind": "lost", "why": why}))
        self.broadcast({"kind": "lost", "worker": worker, "why": why})

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Close all connections when every process has finished or gone, at most after `wait_s`; safe to call twice."""
        with self._lock:
            if self._close_by is None:
                self._close_by = monotonic() + wait_s
        self._wake_up.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------ the hub's thread

    def _serve(self) -> None:
        beat_at = monotonic()
        try:
            while not self._is_done():
                before = monotonic()
                for key, mask in self._selector.select(max(0.0, min(beat_at - before, self._beat_s))):
                    self._attend(key, mask)
                self._watch_unsent()
                if monotonic() >= beat_at:
                    for worker in list(self._peers):
                        self.tell(worker, BEAT)
                    beat_at = monotonic() + self._beat_s
                # Every message that arrived by `before` has been read. So after this process itself was suspended
                # (by its machine or a signal), it does not take the other processes for silent.
                self._look_for_silence(before)
            self.broadcast(BYE)
        except Exception as error:  # no goodbye: the links would take it for a normal end
            self.lose(0, f"worker 0's control thread failed ({type(error).__name__}: {error})")
            raise
        finally:
            for peer in (*self._unauthenticated, *self._peers.values()):
                self._disconnect(peer)
            self._selector.close()
            self._listener.close()
            self._wake_up.close()

    def _is_done(self) -> bool:
        if self._close_by is None:
            return False
        return monotonic() >= self._close_by or all(peer.has_finished for peer in self._peers.values())

    def _attend(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wake_up.receiver:
            self._wake_up.drain()
        else:
            peer: _Peer = key.data
            if mask & selectors.EVENT_WRITE and not peer.connection.flush():
                self._selector.modify(peer.connection.sock, selectors.EVENT_READ, peer)
            if mask & selectors.EVENT_READ:
                try:
                    self._receive(peer)
                except Exception as error:  # costs this connection only, whether it has shown the token or not
                    self._gone(peer, f"{peer.name} sent what is no control message ({error})")

    def _accept(self) -> None:
        with suppress(OSError):  # the peer has closed already, or this process is out of file descriptors
            sock, _ = self._listener.accept()
            peer = _Peer(Connection(sock, UNAUTHENTICATED_LIMIT_BYTES))
            self._unauthenticated.add(peer)
            self._selector.register(sock, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Peer) -> None:
        messages = peer.connection.receive()
        if messages is None:
            self._gone(peer, f"{peer.name} died")
            return
        for message in messages:
            kind = message["kind"]
            if peer.worker is None:
                if not self._admit(peer, message):
                    self._gone(peer, "")
                    return
            elif any(type(message[key]) is not int for key in _WHOLE if key in message):
                raise NoMessage(f"{', '.join(_WHOLE)} are whole numbers, but it said {str(message)[:100]}")
            elif kind == "bye":
                peer.has_said_goodbye = True
            elif kind in RELAYED:
                self.broadcast({**message, "worker": peer.worker})
            elif kind in _HEARD:
                peer.has_finished |= kind == "finished"
                self.inbox.put((peer.connection.heard_at, peer.worker, message))
            elif kind != "beat":
                raise NoMessage(f"nobody knows the kind {kind[:40]!r}")

    def _admit(self, peer: _Peer, hello: Message) -> bool:
        """Admit a connection that shows the token and names a worker that is not connected yet."""
        worker, token = hello.get("worker"), hello.get("token")
        if hello["kind"] != "hello" or not isinstance(token, str) or type(worker) is not int:
            return False
        if not hmac.compare_digest(token.encode(), self._address.token.encode()):
            return False
        with self._lock:
            if worker not in self._backlog:  # not a worker of this run, or connected already
                return False
            peer.worker, peer.name = worker, f"worker {worker} (pid {hello.get('pid')} on {hello.get('host')})"
            peer.connection.unpacker.limit_bytes = LIMIT_BYTES
            self._unauthenticated.discard(peer)
            self._peers[worker] = peer
            for message in ({"kind": "welcome"}, *self._backlog.pop(worker)):
                if peer.connection.send(message):
                    self._unsent.add(peer)
        return True

    def _gone(self, peer: _Peer, why: str) -> None:
        # Report the loss before the connection closes: worker 0's own link then lets its process close the hub.
        if peer.worker is not None and not peer.has_said_goodbye:
            self.lose(peer.worker, why)
        self._disconnect(peer)

    def _disconnect(self, peer: _Peer) -> None:
        with self._lock:
            self._unsent.discard(peer)
            self._unauthenticated.discard(peer)
            if peer.worker is not None:
                self._peers.pop(peer.worker, None)
        with suppress(KeyError, ValueError):  # disconnected before
            self._selector.unregister(peer.connection.sock)
        peer.connection.close()

    def _watch_unsent(self) -> None:
        with self._lock:
            unsent, self._unsent = self._unsent, set()
        for peer in unsent:
            self._selector.modify(peer.connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _look_for_silence(self, now: float) -> None:
        for peer in [one for one in self._unauthenticated if now - one.connected_at > _INTRODUCTION_S]:
            self._disconnect(peer)
        for peer in list(self._peers.values()):
            if now - peer.connection.heard_at > self._patience_s:
                self._gone(peer, f"{peer.name} has been silent for {self._patience_s:g} s")
        if self._backlog and now - self._opened_at > self._arrival_s:
            late = min(self._backlog)
            self.lose(late, f"worker {late} has not connected to worker 0 within {self._arrival_s:g} s")
