"""How a control message looks on the wire: four bytes of length, then one JSON object with a "kind".

JSON and never pickle: whoever can reach the port could otherwise run code.
"""

from __future__ import annotations

import json
import struct
from typing import Any, TypeAlias

from quorate.errors import BadInput, QuorateError

Message: TypeAlias = dict[str, Any]

#: The largest message, and the largest of somebody who has not shown the token yet.
LIMIT_BYTES, STRANGERS_LIMIT_BYTES = 1 << 20, 4096

_LENGTH = struct.Struct(">I")


class NoMessage(QuorateError, RuntimeError):  # noqa: N818 - what came instead of one
    """Bytes came that are no control message."""


def pack(message: Message) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LIMIT_BYTES:
        raise BadInput(f"a {message.get('kind')} message has {len(body)} bytes; at most {LIMIT_BYTES} can be sent")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Makes messages of bytes as they come, in pieces of any size."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._bytes = bytearray()

    @property
    def is_torn(self) -> bool:
        """Whether the bytes so far end in the middle of a message."""
        return bool(self._bytes)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now; raises `NoMessage` at the first that is none."""
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
        message = json.loads(body)
    except (ValueError, RecursionError):  # also where it is no UTF-8
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise NoMessage(f"no JSON object with a kind: {body[:40]!r}")
    return message
