"""A model is cut between tensors into parts as even as they can be."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from quorate.engines.ray.shard import cut

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 15))
def test_the_parts_are_neighbours_none_is_empty_and_nothing_is_missing(sizes: list[int], shards: int) -> None:
    parts = cut(sizes, shards)
    assert len(parts) == min(shards, len(sizes))
    assert all(sizes[part] for part in parts)
    assert [size for part in parts for size in sizes[part]] == sizes


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 9))  # small, so that sums meet bounds
def test_no_other_cut_has_a_smaller_largest_part(sizes: list[int], shards: int) -> None:
    shards = min(shards, len(sizes))
    largest = max(sum(sizes[part]) for part in cut(sizes, shards))
    for bounds in combinations(range(1, len(sizes)), shards - 1):
        ends = [0, *bounds, len(sizes)]
        assert largest <= max(sum(sizes[a:b]) for a, b in pairwise(ends))
