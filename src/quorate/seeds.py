"""Randomness as a pure function: the same (seed, stream, coordinates) give the same draw, in any order.

No function here has state. So a run that is resumed, replayed or repeated on another engine draws the same
numbers, and two policies compared on one seed meet the same slow workers.
"""

from __future__ import annotations

from zlib import crc32

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
_UNIT = 2.0**-53


def mix64(z: int) -> int:
    """SplitMix64's finaliser: a bijection on 64-bit integers whose output bits look independent."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def derive(seed: int, stream: str, *coordinates: int) -> int:
    """A 64-bit seed of its own for one stream of a run, e.g. ``derive(seed, "latency", worker)``."""
    z = mix64((seed * GOLDEN64 + crc32(stream.encode())) & MASK64)
    for coordinate in coordinates:
        z = mix64((z + (coordinate + 1) * GOLDEN64) & MASK64)
    return z


def uniform(key: int, index: int) -> float:
    """The index-th draw from U(0,1) of the stream `key` (made by `derive`); never 0 and never 1."""
    # mix64 is inlined: this runs once per ticket, and a call would double its cost.
    z = (key + index * GOLDEN64) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return ((z ^ (z >> 31)) >> 12) * 2.0 * _UNIT + _UNIT
