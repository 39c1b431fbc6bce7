"""Arrays of Ray's object store as memory of one's own: read in place, and only what is changed is copied.

Ray gives large arrays as read-only views of memory that every worker of a node shares. A task may change its tensors
(normalise them, say), which must reach nobody else; a copy in each worker would hold the data many times over. The
memory's file has no name any more, but the raylet, parent of every worker, has it open; mapped again as private, the
system copies a page when it is written. Where that is not possible, the array is copied.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Less than this is copied: a mapping is not worth it.
WORTH_MAPPING_BYTES = 1_000_000
_WIDEST_BYTES = 16  # of one element, complex numbers; Ray begins arrays at multiples of 64
#: Arrays whose memory is mapped: while they live, Ray does not give it to other objects. A worker has one task.
_pinned: list[Any] = []


def own(array: Any) -> Tensor:
    """The bytes of an array [n], to read and to change without anybody else noticing."""
    if array.nbytes >= WORTH_MAPPING_BYTES:
        with suppress(OSError, ValueError):
            mapped = _mapped(array)
            if mapped is not None:
                _pinned.append(array)
                return mapped
    return torch.from_numpy(array.copy())


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    inode: int


def _mapped(array: Any) -> Tensor | None:
    at = array.__array_interface__["data"][0]
    place = _mapping_at(at)
    if place is None or at + array.nbytes > place.end or at % _WIDEST_BYTES:
        return None
    descriptor = _open_at_parent(place.inode)
    if descriptor is None:
        return None
    try:
        in_file = place.offset + at - place.start
        before = in_file % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(descriptor, before + array.nbytes, access=mmap.ACCESS_COPY, offset=in_file - before)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=before)


def _mapping_at(address: int) -> _Mapping | None:
    """The shared mapping of a file that an address lies in, from /proc."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, rights, offset, _, inode, *_ = line.split()
        start, end = (int(place, 16) for place in places.split("-"))
        if start <= address < end:
            return _Mapping(start, end, int(offset, 16), int(inode)) if rights.endswith("s") else None
    return None


def _open_at_parent(inode: int) -> int | None:
    """The file with this number, as the parent process has it open."""
    for entry in Path(f"/proc/{os.getppid()}/fd").iterdir():
        with suppress(OSError):
            if entry.stat().st_ino == inode:
                return os.open(entry, os.O_RDONLY)
    return None
