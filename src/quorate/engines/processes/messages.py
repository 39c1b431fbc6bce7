"""What the main process and a worker tell each other: a few numbers in a packet of fixed form, never a pickle."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

#: Bytes a packet may have; a traceback that is longer is cut in front.
PACKET_BYTES = 32_768

READY, DONE, REFUSED, ABANDONED, FAILED = 1, 2, 3, 4, 5
START, STOP = 1, 2

_HEAD = struct.Struct("=B")
_START = struct.Struct("=Bqqqiiqd")
_DONE = struct.Struct("=Bqddd?")
_REFUSED = struct.Struct("=Bq")
_ABANDONED = struct.Struct("=Bqd")
_FAILED = struct.Struct("=Bqq?")


class Work(NamedTuple):
    """A ticket, as its worker sees it."""

    ticket: int
    version: int
    batch: int
    version_block: int  # where the parameters are
    gradient_block: int  # where the gradient goes
    next_batch: int  # likely to be asked for next; -1: no idea
    delay_s: float  # to wait before computing, as an injected latency says


class Done(NamedTuple):
    """A finished ticket; its gradient is in its block."""

    ticket: int
    loss: float
    data_s: float  # waiting for the batch
    compute_s: float
    some_missing: bool  # parameters that the loss did not reach; the block says which


class Refused(NamedTuple):
    """A finished ticket whose loss or gradient is not finite."""

    ticket: int


class Abandoned(NamedTuple):
    """A cancelled ticket: so long after being told the worker stopped."""

    ticket: int
    cancel_s: float


class Failed(NamedTuple):
    """The worker met an exception and ends; which ticket and batch (-1: none), and what it was."""

    ticket: int
    batch: int
    bad_input: bool  # the user's to mend; trying again is no use
    text: str


def pack_start(work: Work) -> bytes:
    return _START.pack(START, *work)


STOP_PACKET = _HEAD.pack(STOP)
READY_PACKET = _HEAD.pack(READY)


def unpack_order(packet: bytes) -> Work | None:
    """What a worker was told; None: stop."""
    return Work(*_START.unpack(packet)[1:]) if packet[0] == START else None


def pack_done(done: Done) -> bytes:
    return _DONE.pack(DONE, *done)


def pack_refused(ticket: int) -> bytes:
    return _REFUSED.pack(REFUSED, ticket)


def pack_abandoned(ticket: int, cancel_s: float) -> bytes:
    return _ABANDONED.pack(ABANDONED, ticket, cancel_s)


def pack_failed(ticket: int, batch: int, bad_input: bool, text: str) -> bytes:
    tail = text.encode()[-(PACKET_BYTES - _FAILED.size) :]
    return _FAILED.pack(FAILED, ticket, batch, bad_input) + tail


Answer = Done | Refused | Abandoned | Failed | None


def unpack_answer(packet: bytes) -> Answer:
    """What a worker says; None: it is ready."""
    kind = packet[0]
    if kind == DONE:
        return Done(*_DONE.unpack(packet)[1:])
    if kind == REFUSED:
        return Refused(*_REFUSED.unpack(packet)[1:])
    if kind == ABANDONED:
        return Abandoned(*_ABANDONED.unpack(packet)[1:])
    if kind == FAILED:
        _, ticket, batch, bad_input = _FAILED.unpack_from(packet)
        return Failed(ticket, batch, bad_input, packet[_FAILED.size :].decode(errors="replace"))
    return None


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep packets apart."""
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    return socket.socketpair(socket.AF_UNIX, kind)
