"""The buffers of one round: gradients on their way, and averages once they have come back."""

from __future__ import annotations

import torch
from torch import Tensor

from quorate.engines.collective.layout import Bucket, Layout, Piece
from quorate.engines.collective.marks import Mark


class Slot:
    """A buffer for every bucket. A round holds one from its first gradient until its update is applied."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.free_mark: Mark = None  # until then, on a GPU, somebody still reads it
        self._buffers = [torch.zeros(one.length, dtype=one.dtype, device=one.device) for one in layout.buckets]
        #: Averages of buckets that travel in several pieces, which lie apart; made when first needed.
        self._joined: dict[int, Tensor] = {}
        self._parts: dict[int, list[tuple[Tensor, slice]]] = {}
        self._whole: dict[int, Tensor] = {}
        for bucket in layout.buckets:
            self._prepare(bucket)

    def _prepare(self, bucket: Bucket) -> None:
        """The views that are needed in every round: by member, where its elements lie."""
        start = 0
        for member, size in zip(bucket.members, bucket.sizes, strict=True):
            parts = []
            for piece in bucket.pieces:
                first, last = max(start, piece.start), min(start + size, piece.stop)
                if first < last or (size == 0 and piece.is_last):
                    at = piece.offset + first - piece.start
                    parts.append(
                        (self._buffers[bucket.number][at : at + last - first], slice(first - start, last - start))
                    )
            self._parts[member] = parts
            if len(bucket.pieces) == 1:
                self._whole[member] = _shaped_like(self._layout.tensor(member), parts[0][0])
            start += size

    # ------------------------------------------------------------ what travels

    def travelling(self, piece: Piece) -> Tensor:
        """What one all-reduce adds up: data and header."""
        bucket = self._layout.buckets[piece.bucket]
        end = piece.offset + piece.stop - piece.start + self._layout.header.length(len(bucket.members))
        return self._buffers[piece.bucket][piece.offset : end]

    def header(self, piece: Piece) -> Tensor:
        return self.travelling(piece)[piece.stop - piece.start :]

    # ------------------------------------------------------------ gradients in

    def fill(self, member: int, gradient: Tensor, weight: float) -> None:
        """Put a gradient in, times its weight."""
        whole = self._whole.get(member)
        if whole is not None:
            if whole.data_ptr() == gradient.data_ptr() and whole.stride() == gradient.stride():
                if weight != 1.0:
                    whole.mul_(weight)  # it was accumulated in place
            elif weight == 1.0:
                whole.copy_(gradient)
            else:
                torch.mul(gradient, weight, out=whole)
            return
        flat = _flat_like(self._layout.tensor(member), gradient)
        for part, where in self._parts[member]:
            if weight == 1.0:
                part.copy_(flat[where])
            else:
                torch.mul(flat[where], weight, out=part)

    def is_finite(self) -> bool:
        """Whether nothing in here is NaN or Inf: their sum would be neither."""
        gradients = [
            buffer
            for buffer, bucket in zip(self._buffers, self._layout.buckets, strict=True)
            if not bucket.holds_buffers
        ]
        sums = [buffer.sum(dtype=torch.float64) for buffer in gradients]
        return all(bool(total.isfinite()) for total in sums)

    def clear(self, member: int) -> None:
        for part, _ in self._parts[member]:
            part.zero_()

    # ------------------------------------------------------------ averages out

    def average(self, bucket: Bucket, scale: float, into: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """Multiply the sums to make them averages, which it gives by member. To be called once a round.

        into: where buckets that travel in several pieces are put together, by number (default: memory of this slot).
        """
        if len(bucket.pieces) == 1:
            if scale != 1.0:
                self._buffers[bucket.number][: bucket.elements].mul_(scale)
            return {member: self._whole[member] for member in bucket.members}
        store = self._joined if into is None else into
        joined = store.get(bucket.number)
        if joined is None:
            joined = store[bucket.number] = torch.empty(bucket.elements, dtype=bucket.dtype, device=bucket.device)
        sums = self._buffers[bucket.number]
        for piece in bucket.pieces:
            data = sums[piece.offset : piece.offset + piece.stop - piece.start]
            torch.mul(data, scale, out=joined[piece.start : piece.stop])
        averages, start = {}, 0
        for member, size in zip(bucket.members, bucket.sizes, strict=True):
            averages[member] = _shaped_like(self._layout.tensor(member), joined[start : start + size])
            start += size
        return averages


def _shaped_like(tensor: Tensor, flat: Tensor) -> Tensor:
    """A view of flat memory with the shape and, where the tensor fills its memory, the order of its elements."""
    if _is_dense(tensor):
        return flat.as_strided(tensor.size(), tensor.stride())
    return flat.view(tensor.size())


def _flat_like(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The elements of a gradient in the order in which `_shaped_like` has them."""
    if not _is_dense(tensor):
        return gradient.reshape(-1)
    if gradient.stride() != tensor.stride() or not _is_dense(gradient):
        gradient = torch.empty_like(tensor).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
