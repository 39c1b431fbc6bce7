"""Buckets: the place of each gradient in the buffers that are all-reduced, and the order in which pieces are sent.

A *bucket* is a run of neighbouring parameters. It is the unit in which gradients become ready and in which the
optimizer updates parameters. A bucket is sent in *pieces* of bounded size, so that an urgent bucket never waits long
behind a large one. Behind its data every piece carries a `Header`, which the same all-reduce sums: the weight of each
worker's gradient, which buckets are not ready, and which parameters have a gradient. Agreement between the workers thus
needs no message of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

#: A CUDA event: a point in a stream's queue that another stream can wait for; None on a CPU.
Event: TypeAlias = Any

#: A piece is one all-reduce. Small pieces let an urgent bucket go sooner; large pieces cost less overhead.
LEAST_PIECE_BYTES = 1 << 20
#: The same if all processes share the cores of one host: an all-reduce takes them from computing and hides no link.
LEAST_PIECE_BYTES_ON_SHARED_CORES = 25 << 20
#: Pieces of a round. With a delay no computation waits for the first piece, so one is enough.
MOST_PIECES, MOST_PIECES_DELAYED = 8, 1
#: All-reduces at once: while one ends and the next is chosen, the network has another to carry.
IN_FLIGHT = 2


@dataclass(frozen=True)
class Piece:
    """A part of a bucket: one all-reduce."""

    bucket: int
    start: int  # elements of the bucket's data
    stop: int
    offset: int  # first element of its data in the bucket's buffer; its header follows the data
    is_last: bool


@dataclass(frozen=True)
class Bucket:
    """Parameters (or buffers of the model) whose gradients are sent and applied together."""

    number: int
    members: tuple[int, ...]  # numbers of tensors, in the order of the buffer
    sizes: tuple[int, ...]  # elements of each member
    dtype: torch.dtype
    device: torch.device
    pieces: tuple[Piece, ...]
    length: int  # elements of its buffer, headers included
    holds_buffers: bool

    @property
    def elements(self) -> int:
        return sum(self.sizes)


class Sums(NamedTuple):
    """The header of a piece, summed over all workers."""

    weights: list[float]  # by worker, the weight of its gradient; 0: it contributed none
    checksums: list[float]  # by worker, checksum of the hyperparameters of its last step; 0: no step
    not_ready: list[float]  # by bucket, workers that had not computed it when they sent; 0 is exact in any float type
    used: list[float]  # by member of the bucket, workers that have a gradient for it


@dataclass(frozen=True)
class Header:
    """The layout of the numbers behind a piece's data."""

    workers: int
    buckets: int

    def length(self, members: int) -> int:
        return 2 * self.workers + self.buckets + members

    def numbers(
        self, worker: int, weight: float, checksum: int, ready: Sequence[bool], used: Sequence[bool]
    ) -> list[float]:
        """The header that one worker sends. ready: by bucket; used: by member of the piece's bucket."""
        numbers = [0.0] * (2 * self.workers)
        numbers[worker], numbers[self.workers + worker] = weight, float(checksum)
        return [*numbers, *(0.0 if one else 1.0 for one in ready), *(1.0 if one else 0.0 for one in used)]

    def sums(self, numbers: list[float]) -> Sums:
        weights, checksums = numbers[: self.workers], numbers[self.workers : 2 * self.workers]
        rest = numbers[2 * self.workers :]
        return Sums(weights, checksums, rest[: self.buckets], rest[self.buckets :])


class BucketLayout:
    """Cuts parameters into buckets, last parameters first: about the order in which backward computes gradients."""

    def __init__(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], workers: int, piece_bytes: int | None = None
    ) -> None:
        self.parameters, self.buffers = list(parameters), list(buffers)
        self._tensors = [*self.parameters, *self.buffers]
        self.piece_bytes = sum(map(_bytes, self.parameters)) if piece_bytes is None else piece_bytes
        count = len(self.parameters)
        runs = self._runs(reversed(range(count))) + self._runs(range(count, len(self._tensors)))
        self.header = Header(workers, len(runs))
        self.buckets = [self._bucket(number, run) for number, run in enumerate(runs)]
        self.bucket_of = {member: bucket.number for bucket in self.buckets for member in bucket.members}
        #: By bucket, the order in which the next forward reads it; the bucket that is read first is sent first.
        self.urgency = [min(bucket.members) if not bucket.holds_buffers else -1 for bucket in self.buckets]

    def tensor(self, member: int) -> Tensor:
        """A parameter by its number; the numbers of buffers follow those of the parameters."""
        return self._tensors[member]

    def _runs(self, members: Iterable[int]) -> list[list[int]]:
        """Neighbours of one type and device, up to `piece_bytes`; a run below half of it also takes a large tensor."""
        runs: list[list[int]] = []
        size, kind = 0, None
        for member in members:
            tensor = self._tensors[member]
            bytes_, its_kind = _bytes(tensor), (_wire_dtype(tensor), tensor.device)
            is_full = size + bytes_ > self.piece_bytes and 2 * size >= self.piece_bytes
            if not runs or its_kind != kind or is_full:
                runs.append([])
                size = 0
            runs[-1].append(member)
            size, kind = size + bytes_, its_kind
        return runs

    def _bucket(self, number: int, run: list[int]) -> Bucket:
        sizes = tuple(self._tensors[member].numel() for member in run)
        first = self._tensors[run[0]]
        dtype = _wire_dtype(first)
        elements, header = sum(sizes), self.header.length(len(run))
        most = max(1, self.piece_bytes // dtype.itemsize)
        count = max(1, -(-elements // (most + most // 4)))  # A piece may be 25 % larger, which saves an all-reduce.
        cuts = [round(index * elements / count) for index in range(count + 1)]
        pieces, offset = [], 0
        for start, stop in pairwise(cuts):
            pieces.append(Piece(number, start, stop, offset, stop == elements))
            offset += stop - start + header
        holds_buffers = run[0] >= len(self.parameters)
        return Bucket(number, tuple(run), sizes, dtype, first.device, tuple(pieces), offset, holds_buffers)


def piece_bytes_for(parameters: Sequence[Tensor], most_pieces: int, share_cores: bool = False) -> int:
    """The size of a piece. It is never tuned by measurement: other cuts would change the last bits of the sums."""
    least = LEAST_PIECE_BYTES_ON_SHARED_CORES if share_cores else LEAST_PIECE_BYTES
    return max(least, -(-sum(map(_bytes, parameters)) // most_pieces))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * _wire_dtype(tensor).itemsize


def _wire_dtype(tensor: Tensor) -> torch.dtype:
    """Integers (BatchNorm counts its batches) are averaged as doubles, which hold them exactly."""
    return tensor.dtype if tensor.dtype.is_floating_point else torch.float64


class RoundBuffers:
    """A buffer for every bucket. A round holds one set from its first gradient until its update is applied."""

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout
        self.free_event: Event = None  # recorded on a GPU after the last read of these buffers
        self._buffers = [torch.zeros(one.length, dtype=one.dtype, device=one.device) for one in layout.buckets]
        #: Averages of buckets that are sent in several pieces, without the headers between; made when first needed.
        self._joined: dict[int, Tensor] = {}
        #: By member, the views of its elements; in buckets of one piece also a view in the member's shape.
        self._parts: dict[int, list[tuple[Tensor, slice]]] = {}
        self._whole: dict[int, Tensor] = {}
        for bucket, buffer in zip(layout.buckets, self._buffers, strict=True):
            start = 0
            for member, size in zip(bucket.members, bucket.sizes, strict=True):
                parts = []
                for piece in bucket.pieces:
                    first, last = max(start, piece.start), min(start + size, piece.stop)
                    if first < last or (size == 0 and piece.is_last):
                        at = piece.offset + first - piece.start
                        parts.append((buffer[at : at + last - first], slice(first - start, last - start)))
                self._parts[member] = parts
                if len(bucket.pieces) == 1:
                    self._whole[member] = _shaped_like(layout.tensor(member), parts[0][0])
                start += size

    def payload(self, piece: Piece) -> Tensor:
        """The data and header of one all-reduce."""
        bucket = self._layout.buckets[piece.bucket]
        end = piece.offset + piece.stop - piece.start + self._layout.header.length(len(bucket.members))
        return self._buffers[piece.bucket][piece.offset : end]

    def header(self, piece: Piece) -> Tensor:
        return self.payload(piece)[piece.stop - piece.start :]

    def fill(self, member: int, gradient: Tensor, weight: float) -> None:
        """Write a gradient times its weight."""
        whole = self._whole.get(member)
        if whole is None:
            flat = _flat_like(self._layout.tensor(member), gradient)
            for part, where in self._parts[member]:
                _write(part, flat[where], weight)
        elif weight != 1.0 or whole.data_ptr() != gradient.data_ptr() or whole.stride() != gradient.stride():
            _write(whole, gradient, weight)  # Otherwise autograd accumulated the gradient in this buffer.

    def is_finite(self) -> bool:
        """Whether no gradient holds NaN or Inf: a sum with one of them is not finite."""
        sums = [
            buffer.sum(dtype=torch.float64)
            for buffer, bucket in zip(self._buffers, self._layout.buckets, strict=True)
            if not bucket.holds_buffers
        ]
        return all(bool(total.isfinite()) for total in sums)

    def clear(self, member: int) -> None:
        for part, _ in self._parts[member]:
            part.zero_()

    def average(self, bucket: Bucket, scale: float, into: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """Scale the sums of a bucket to averages, by member. Call this once a round.

        into: by bucket number, memory for the averages of buckets in several pieces (default: memory of this object).
        """
        sums = self._buffers[bucket.number]
        if len(bucket.pieces) == 1:
            if scale != 1.0:
                sums[: bucket.elements].mul_(scale)
            return {member: self._whole[member] for member in bucket.members}
        store = self._joined if into is None else into
        joined = store.get(bucket.number)
        if joined is None:
            joined = store[bucket.number] = torch.empty(bucket.elements, dtype=bucket.dtype, device=bucket.device)
        for piece in bucket.pieces:
            data = sums[piece.offset : piece.offset + piece.stop - piece.start]
            torch.mul(data, scale, out=joined[piece.start : piece.stop])
        averages, start = {}, 0
        for member, size in zip(bucket.members, bucket.sizes, strict=True):
            averages[member] = _shaped_like(self._layout.tensor(member), joined[start : start + size])
            start += size
        return averages


def _write(target: Tensor, gradient: Tensor, weight: float) -> None:
    if weight == 1.0:
        target.copy_(gradient)
    else:
        torch.mul(gradient, weight, out=target)


def _shaped_like(tensor: Tensor, flat: Tensor) -> Tensor:
    """A view of flat memory in a tensor's shape and, if the tensor is dense, in its order of elements."""
    if _is_dense(tensor):
        return flat.as_strided(tensor.size(), tensor.stride())
    return flat.view(tensor.size())


def _flat_like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The elements of a gradient in the order of `_shaped_like`."""
    if not _is_dense(tensor):
        return gradient.reshape(-1)
    if gradient.stride() != tensor.stride() or not _is_dense(gradient):
        gradient = torch.empty_like(tensor).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class PieceOrder:
    """The order of one round's pieces.

    A piece's header says which buckets some worker was not ready with when it sent the piece. The sums tell all workers
    the same. Of the buckets that all workers have computed, the most urgent goes next; if there is none, the next one
    in backward's order. The choice for the n-th piece uses the sums of the (n − IN_FLIGHT)-th, which are old. So a
    bucket also counts as computed from that piece on at which it was computed in the previous round.

    before: by bucket, that piece of the previous round (`ready_at` of its order).
    """

    def __init__(
        self, buckets: Sequence[Bucket], urgency: Sequence[int], before: Sequence[int | None] | None = None
    ) -> None:
        self._before = before or [None] * len(buckets)
        self.ready_at: list[int | None] = [None] * len(buckets)  # by bucket, the first piece sent when all had it
        self._chosen = self._heard = 0
        self._waiting: list[list[Piece]] = [list(reversed(bucket.pieces)) for bucket in buckets]
        self._by_urgency = sorted(range(len(buckets)), key=lambda number: urgency[number])
        self._ready = [False] * len(buckets)
        self.left = sum(len(bucket.pieces) for bucket in buckets)

    def heard(self, not_ready: Sequence[float]) -> None:
        """The sums of a piece are in; call this in the order in which pieces were sent."""
        for number, missing in enumerate(not_ready):
            if missing == 0:
                self._ready[number] = True
                if self.ready_at[number] is None:
                    self.ready_at[number] = self._heard
        self._heard += 1

    def next(self) -> Piece:
        """The piece to send next; call this only while some are left."""
        self.left -= 1
        place, self._chosen = self._chosen, self._chosen + 1
        for number in self._by_urgency:
            before = self._before[number]
            if self._waiting[number] and (self._ready[number] or (before is not None and before <= place)):
                return self._waiting[number].pop()
        return next(pieces for pieces in self._waiting if pieces).pop()


def buffers_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Buffers that are state of the model and can be averaged."""
    return [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if buffer.dtype.is_floating_point or buffer.dtype in (torch.int64, torch.int32)
    ]
