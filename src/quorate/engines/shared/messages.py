"""Messages between the main process and a worker: a few numbers in a packet of fixed form, never a pickle."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

#: Maximum packet size in bytes; of a longer traceback, the end is sent.
PACKET_BYTES = 32_768

READY, DONE, REFUSED, ABANDONED, FAILED = 1, 2, 3, 4, 5
START, STOP = 1, 2

_START = struct.Struct("=Bqqqiiqd")
_DONE = struct.Struct("=Bqddd?")
_REFUSED = struct.Struct("=Bq")
_ABANDONED = struct.Struct("=Bqd")
_FAILED = struct.Struct("=Bqq?")


class TicketOrder(NamedTuple):
    """A ticket for a worker to compute."""

    ticket: int
    version: int
    batch: int
    version_block: int  # block of the parameters
    gradient_block: int  # block for the gradient
    next_batch: int  # the batch to prefetch; -1: unknown
    delay_s: float  # injected latency, before computing


class DoneAnswer(NamedTuple):
    """A finished ticket; its gradient is in its block."""

    ticket: int
    loss: float
    data_s: float  # waiting for the batch
    compute_s: float
    some_missing: bool  # some parameters have no gradient; the mask in the block says which


class RefusedAnswer(NamedTuple):
    """A finished ticket whose loss or gradient is not finite."""

    ticket: int


class AbandonedAnswer(NamedTuple):
    """A cancelled ticket that the worker has abandoned."""

    ticket: int
    cancel_s: float  # from the cancellation until the worker stopped


class FailedAnswer(NamedTuple):
    """The worker ends because of an exception."""

    ticket: int  # -1: none
    batch: int  # -1: none
    bad_input: bool  # the user must fix the input; a retry cannot help
    text: str


def pack_start(work: TicketOrder) -> bytes:
    return _START.pack(START, *work)


STOP_PACKET, READY_PACKET = bytes([STOP]), bytes([READY])


def unpack_order(packet: bytes) -> TicketOrder | None:
    """An order to a worker; None: stop."""
    return TicketOrder(*_START.unpack(packet)[1:]) if packet[0] == START else None


def pack_done(done: DoneAnswer) -> bytes:
    return _DONE.pack(DONE, *done)


def pack_refused(ticket: int) -> bytes:
    return _REFUSED.pack(REFUSED, ticket)


def pack_abandoned(ticket: int, cancel_s: float) -> bytes:
    return _ABANDONED.pack(ABANDONED, ticket, cancel_s)


def pack_failed(ticket: int, batch: int, bad_input: bool, text: str) -> bytes:
    tail = text.encode(errors="backslashreplace")[-(PACKET_BYTES - _FAILED.size) :]
    return _FAILED.pack(FAILED, ticket, batch, bad_input) + tail


Answer = DoneAnswer | RefusedAnswer | AbandonedAnswer | FailedAnswer | None


def unpack_answer(packet: bytes) -> Answer:
    """An answer of a worker; None: it is ready."""
    kind = packet[0]
    if kind == DONE:
        return DoneAnswer(*_DONE.unpack(packet)[1:])
    if kind == REFUSED:
        return RefusedAnswer(*_REFUSED.unpack(packet)[1:])
    if kind == ABANDONED:
        return AbandonedAnswer(*_ABANDONED.unpack(packet)[1:])
    if kind == FAILED:
        _, ticket, batch, bad_input = _FAILED.unpack_from(packet)
        return FailedAnswer(ticket, batch, bad_input, packet[_FAILED.size :].decode(errors="replace"))
    return None


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep packets apart."""
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    return socket.socketpair(socket.AF_UNIX, kind)
