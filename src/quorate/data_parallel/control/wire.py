"""Control messages on the wire, and the TCP connection that carries them.

Messages are JSON, never pickle: with pickle, anybody who can reach the port could run code.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
from contextlib import suppress
from time import monotonic
from typing import Any, TypeAlias
from weakref import WeakSet

from quorate.errors import BadInput, QuorateError

Message: TypeAlias = dict[str, Any]

#: The largest message, and the largest message of a connection that has not shown the token yet.
LIMIT_BYTES, UNAUTHENTICATED_LIMIT_BYTES = 1 << 20, 4096

_LENGTH = struct.Struct(">I")


class NoMessage(QuorateError, RuntimeError):  # noqa: N818 - names the bytes, not an error
    """The received bytes are not a control message."""


def pack(message: Message) -> bytes:
    """The bytes of one message. A lone surrogate, as in a file name that is not UTF-8, becomes a "?"."""
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    if len(body) > LIMIT_BYTES:
        raise BadInput(f"a {message.get('kind')} message has {len(body)} bytes; at most {LIMIT_BYTES} can be sent")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Parses messages from a byte stream that arrives in chunks of any size."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now; raises `NoMessage` at the first invalid one."""
        self._bytes += data
        found: list[Message] = []
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            if length > self.limit_bytes:
                raise NoMessage(f"a message of {length} bytes was announced; at most {self.limit_bytes} are taken")
            if len(self._bytes) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            found.append(_parsed(bytes(self._bytes[at : at + length])))
            at += length
        del self._bytes[:at]
        return found


def _parsed(body: bytes) -> Message:
    try:
        message = json.loads(body.decode())
        if b"\\u" in body:  # may escape a lone surrogate, which no file, terminal or hash accepts
            json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # ValueError covers invalid UTF-8, too
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise NoMessage(f"no JSON object with a kind: {body[:40]!r}")
    return message


_READ_BYTES = 1 << 16

#: Sockets that a forked child must close. Otherwise a data loader's process keeps the connection of a killed process
#: open, and the loss goes unnoticed.
_ours: WeakSet[socket.socket] = WeakSet()


def keep_from_children(sock: socket.socket) -> socket.socket:
    """Close this socket in every process forked from this one."""
    _ours.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_ours):
        with suppress(OSError):
            sock.close()


os.register_at_fork(after_in_child=_close_in_child)


class WakeUp:
    """Interrupts a selector's wait from another thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.receiver, self._sender = socket.socketpair()
        for sock in (self.receiver, self._sender):
            keep_from_children(sock).setblocking(False)
        selector.register(self.receiver, selectors.EVENT_READ)

    def wake(self) -> None:
        with suppress(OSError):  # the buffer is full, so it wakes anyway; or it is closed
            self._sender.send(b"!")

    def drain(self) -> None:
        with suppress(BlockingIOError):
            self.receiver.recv(4096)

    def close(self) -> None:
        self.receiver.close()
        self._sender.close()


class Connection:
    """Any thread may send. `send` writes as much as the kernel takes at once; the reading thread flushes the rest."""

    def __init__(self, sock: socket.socket, limit_bytes: int = LIMIT_BYTES) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = keep_from_children(sock)
        self.heard_at = monotonic()
        self.unpacker = Unpacker(limit_bytes)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._is_closed = False

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> bool:
        """Send without waiting; returns whether bytes are left for `flush`."""
        data = pack(message)
        with self._lock:
            self._unsent += data
            return self._flush()

    def flush(self) -> bool:
        """Send more of the unsent bytes; returns whether any are left."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._unsent and not self._is_closed:
            try:
                del self._unsent[: self.sock.send(self._unsent)]
            except BlockingIOError:
                return True
            except OSError:  # the other side is gone; `receive` reports it
                self._unsent.clear()
        return False

    def receive(self) -> list[Message] | None:
        """The messages received so far, without waiting; None if the other side has closed. May raise `NoMessage`."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard_at = monotonic()
        return self.unpacker.feed(data)

    def end_sending(self) -> None:
        """Close the sending direction."""
        with self._lock, suppress(OSError):
            if not self._is_closed:
                self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._unsent.clear()
            self.sock.close()
