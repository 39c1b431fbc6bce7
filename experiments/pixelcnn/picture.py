"""Pictures as one PNG file, with the standard library alone: the machine that trains may have nothing else."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

_GAP = 2  # pixels of white


def as_grid(images: Tensor, columns: int, scale: int = 1) -> Tensor:
    """Pictures [n, 3, h, w] in bytes, row by row, each pixel `scale` times as high and wide: [3, height, width]."""
    rows = -(-len(images) // columns)
    n, colours = images.shape[:2]
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    images = functional.pad(images, (_GAP, 0, _GAP, 0), value=255)
    blank = images.new_full((rows * columns - n, *images.shape[1:]), 255)
    table = torch.cat([images, blank]).view(rows, columns, *images.shape[1:])
    grid = table.permute(2, 0, 3, 1, 4).reshape(colours, rows * images.shape[2], columns * images.shape[3])
    return functional.pad(grid, (0, _GAP, 0, _GAP), value=255)


def write_png(file: Path, image: Tensor) -> None:
    """A picture [3, h, w] in bytes as a PNG file."""
    _, height, width = image.shape
    lines = functional.pad(image.permute(1, 2, 0).reshape(height, 3 * width), (1, 0))  # each begins with "no filter"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(lines.flatten().tolist()), 9)
    pieces = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_piece(name, content) for name, content in pieces))


def _piece(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
