"""Where a model is cut into shards: between tensors, never through one, so that every optimizer stays correct."""

from __future__ import annotations

from collections.abc import Sequence


def cut(sizes: Sequence[int], shards: int) -> list[slice]:
    """Neighbouring tensors of these sizes in so many parts, the largest as small as it can be.

    There are never more parts than tensors, and none is empty.
    """
    shards = min(shards, len(sizes))
    smallest, largest = max(sizes), sum(sizes)
    while smallest < largest:
        middle = (smallest + largest) // 2
        if _parts_needed(sizes, middle) <= shards:
            largest = middle
        else:
            smallest = middle + 1
    bounds = [0]
    filled = 0
    for place, size in enumerate(sizes):
        must_split = len(sizes) - place == shards - len(bounds)  # one tensor is left for each part that is left
        if place > bounds[-1] and (filled + size > largest or must_split):
            bounds.append(place)
            filled = 0
        filled += size
    return [slice(start, stop) for start, stop in zip(bounds, [*bounds[1:], len(sizes)], strict=True)]


def _parts_needed(sizes: Sequence[int], most: int) -> int:
    """How many parts there are if each is filled up to `most`, one after the other."""
    parts, filled = 1, 0
    for size in sizes:
        if filled + size > most:
            parts, filled = parts + 1, 0
        filled += size
    return parts
