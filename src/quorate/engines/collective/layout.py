"""Where each gradient lies in the buffers that travel.

A *bucket* is a run of neighbouring parameters: the unit in which gradients become ready, and in which the optimizer
updates parameters. It travels in *pieces* of bounded size, so that an urgent bucket never waits long behind a large
one. Behind its data every piece carries a few numbers (`Header`) that the same all-reduce adds up: who contributed how
much, who is not ready with which bucket, and which parameters anybody used. So agreement costs no message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quorate.engines.collective.pace import Pace

#: A piece is an all-reduce: smaller ones let an urgent bucket go sooner, larger ones cost less work.
LEAST_PIECE_BYTES = 1 << 16
#: A piece takes this many times as long as an all-reduce of nothing, ...
WORTH_ITS_LATENCY = 40
#: ... and a round has so many pieces at most; one where nobody waits for the first of them.
MOST_PIECES, MOST_PIECES_DELAYED = 8, 1
#: Where threads wait for cores so much of its time, it cannot hide behind computation: one piece costs least.
CONTENDED = 0.45


@dataclass(frozen=True)
class Piece:
    """A part of a bucket: one all-reduce."""

    bucket: int
    start: int  # elements of the bucket's data
    stop: int
    offset: int  # where its data begins in the buffer of its bucket; its header follows the data
    is_last: bool


@dataclass(frozen=True)
class Bucket:
    """Parameters (or buffers of the model) whose gradients travel and are applied together."""

    number: int
    members: tuple[int, ...]  # numbers of tensors, in the order in which they lie
    sizes: tuple[int, ...]  # elements of each
    dtype: torch.dtype
    device: torch.device
    pieces: tuple[Piece, ...]
    length: int  # elements of its buffer, headers included
    holds_buffers: bool = False

    @property
    def elements(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Header:
    """Where the numbers stand behind a piece's data."""

    workers: int
    buckets: int

    def length(self, members: int) -> int:
        return 2 * self.workers + self.buckets + members

    def numbers(
        self, worker: int, weight: float, stamp: int, ready: Sequence[bool], used: Sequence[bool]
    ) -> list[float]:
        """What one worker puts there; `ready` goes by bucket, `used` by member of the piece's bucket."""
        numbers = [0.0] * (2 * self.workers)
        numbers[worker], numbers[self.workers + worker] = weight, float(stamp)
        return [*numbers, *(0.0 if one else 1.0 for one in ready), *(1.0 if one else 0.0 for one in used)]

    def sums(self, numbers: list[float]) -> Sums:
        """What the numbers of all workers, added up, say."""
        weights, stamps = numbers[: self.workers], numbers[self.workers : 2 * self.workers]
        rest = numbers[2 * self.workers :]
        return Sums(weights, stamps, rest[: self.buckets], rest[self.buckets :])


class Sums(NamedTuple):
    """What comes back with a piece."""

    weights: list[float]  # by worker, what its gradient counts; 0 for one that contributed nothing
    stamps: list[float]  # by worker, what stands for the hyperparameters of its last step; 0 for none
    not_ready: list[float]  # by bucket, how many had not computed it when the piece left; 0 stays 0 in any float type
    used: list[float]  # by member of the bucket, how many have a gradient for it


class Layout:
    """Cuts parameters into buckets, last parameters first: that is about the order in which backward computes them."""

    def __init__(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], workers: int, piece_bytes: int | None = None
    ) -> None:
        self.parameters, self.buffers = list(parameters), list(buffers)
        self.piece_bytes = sum(map(_bytes, self.parameters)) if piece_bytes is None else piece_bytes
        runs = _runs(self.parameters, list(reversed(range(len(self.parameters)))), self.piece_bytes)
        count = len(self.parameters)
        state = _runs(self.buffers, list(range(len(self.buffers))), self.piece_bytes)
        self.header = Header(workers, len(runs) + len(state))
        self.buckets = [self._bucket(number, run, self.parameters) for number, run in enumerate(runs)]
        for run in state:  # buffers are numbered after the parameters
            self.buckets.append(self._bucket(len(self.buckets), run, self.buffers, count))
        self.bucket_of = {member: bucket.number for bucket in self.buckets for member in bucket.members}
        #: By bucket: how early the next forward reads it; what is needed first goes first.
        self.urgency = [min(bucket.members) if not bucket.holds_buffers else -1 for bucket in self.buckets]

    def tensor(self, member: int) -> Tensor:
        count = len(self.parameters)
        return self.parameters[member] if member < count else self.buffers[member - count]

    def _bucket(self, number: int, run: list[int], tensors: list[Tensor], first: int = 0) -> Bucket:
        sizes = tuple(tensors[index].numel() for index in run)
        one = tensors[run[0]]
        dtype = _wire_dtype(one)
        elements, header = sum(sizes), self.header.length(len(run))
        most = max(1, self.piece_bytes // dtype.itemsize)
        count = max(1, -(-elements // (most + most // 4)))  # a little more than a piece is not worth another
        cuts = [round(index * elements / count) for index in range(count + 1)]
        pieces, offset = [], 0
        for start, stop in pairwise(cuts):
            pieces.append(Piece(number, start, stop, offset, stop == elements))
            offset += stop - start + header
        members = tuple(first + index for index in run)
        return Bucket(
            number, members, sizes, dtype, one.device, tuple(pieces), offset, first > 0 or tensors is self.buffers
        )


def piece_bytes_for(parameters: Sequence[Tensor], pace: Pace, most_pieces: int) -> int:
    """How much to send at once over a network of this pace."""
    worth_it = int(WORTH_ITS_LATENCY * pace.latency_s / max(pace.byte_s, 1e-15))
    most = 1 if pace.contention >= CONTENDED else most_pieces
    return max(LEAST_PIECE_BYTES, worth_it, -(-sum(map(_bytes, parameters)) // most))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * _wire_dtype(tensor).itemsize


def _wire_dtype(tensor: Tensor) -> torch.dtype:
    """Whole numbers (BatchNorm counts its batches) are averaged as doubles, which hold them exactly."""
    return tensor.dtype if tensor.dtype.is_floating_point else torch.float64


def _runs(tensors: list[Tensor], order: list[int], most_bytes: int) -> list[list[int]]:
    """Neighbours of one type and device, up to so many bytes; what is less than half of that also takes a large one."""
    runs: list[list[int]] = []
    size, kind = 0, None
    for index in order:
        tensor = tensors[index]
        bytes_, its_kind = _bytes(tensor), (_wire_dtype(tensor), tensor.device)
        if not runs or its_kind != kind or (size + bytes_ > most_bytes and 2 * size >= most_bytes):
            runs.append([])
            size = 0
        runs[-1].append(index)
        size, kind = size + bytes_, its_kind
    return runs
