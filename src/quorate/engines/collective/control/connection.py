"""One TCP connection that messages go over, used by one thread that reads and many that send."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from time import monotonic
from weakref import WeakSet

from quorate.engines.collective.control.wire import LIMIT_BYTES, Message, Unpacker, pack

_READ_BYTES = 1 << 16

#: Everything that a forked child must close: a data loader's process would otherwise keep the connection of a
#: process that was killed open, and nobody would notice.
_ours: WeakSet[socket.socket] = WeakSet()


def keep_from_children(sock: socket.socket) -> socket.socket:
    """Let this socket be closed in every process that is forked from this one."""
    _ours.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_ours):
        with suppress(OSError):
            sock.close()


os.register_at_fork(after_in_child=_close_in_child)


class Connection:
    """Sends at once, from whatever thread, what the system takes; the rest is left to the thread that reads."""

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
        """Send, without waiting; gives whether something is left that `flush` must send."""
        data = pack(message)
        with self._lock:
            self._unsent += data
            return self._flush()

    def flush(self) -> bool:
        """Send more of what is left; gives whether something is left still."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._unsent and not self._is_closed:
            try:
                del self._unsent[: self.sock.send(self._unsent)]
            except BlockingIOError:
                return True
            except OSError:  # the other side is gone, which reading will tell
                self._unsent.clear()
        return False

    def receive(self) -> list[Message] | None:
        """What has come, without waiting; None when the other side has ended the connection. May raise `NoMessage`."""
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
        """Tell the other side that nothing more will come."""
        with self._lock, suppress(OSError):
            if not self._is_closed:
                self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._unsent.clear()
            self.sock.close()
