"""Many tensors in one contiguous buffer: copying a version of the parameters is one copy, not hundreds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quorate.errors import BadInput

ALIGNMENT_BYTES = 64  # a cache line, and the alignment of torch's own allocator: kernels take the same path


class Layout:
    """The offset of each tensor in a flat buffer of bytes; types may be mixed."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        self.dtypes = [tensor.dtype for tensor in tensors]
        self.offsets: list[int] = []
        self.nbytes = 0
        for tensor in tensors:
            self.offsets.append(self.nbytes)
            size = tensor.numel() * tensor.element_size()
            self.nbytes += math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def halved(self) -> Layout:
        """The layout with the same elements in the same order, in 16 bits each."""
        if any(dtype != torch.float32 for dtype in self.dtypes):
            raise BadInput("a 16-bit wire (bf16) needs parameters of 32 bits, and this model has others; use fp32")
        other = Layout([])
        other.shapes, other.dtypes = self.shapes, [torch.bfloat16] * len(self.dtypes)
        other.offsets, other.nbytes = [offset // 2 for offset in self.offsets], self.nbytes // 2
        return other

    def runs(self, buffer: Tensor) -> list[Tensor]:
        """The buffer as a few long vectors, one for each run of tensors of equal type; padding is included."""
        found: list[Tensor] = []
        start = 0
        for place, dtype in enumerate(self.dtypes):
            last = place + 1 == len(self.dtypes)
            if last or self.dtypes[place + 1] != dtype:
                stop = self.nbytes if last else self.offsets[place + 1]
                found.append(buffer[start:stop].view(dtype))
                start = stop
        return found

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors inside a buffer of `nbytes` bytes, without copying."""
        return [
            buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for offset, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=True)
        ]


class Flat:
    """Tensors side by side in one buffer: `views[i]` is the i-th tensor, `buffer` holds the bytes of all."""

    def __init__(self, layout: Layout, device: torch.device, buffer: Tensor | None = None) -> None:
        self.layout = layout
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) if buffer is None else buffer
        self.views = layout.views(self.buffer)

    @classmethod
    def copy_of(cls, tensors: Sequence[Tensor], device: torch.device) -> Flat:
        flat = cls(Layout(tensors), device)
        for view, tensor in zip(flat.views, tensors, strict=True):
            view.copy_(tensor.detach())
        return flat

    def copy(self) -> Flat:
        """Another buffer of the same layout and contents."""
        flat = Flat(self.layout, self.buffer.device)
        flat.buffer.copy_(self.buffer)
        return flat
