"""Memory of a shard is found by processes of its node, and by nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quorate.engines.ray.transport import Segment, SegmentAddress, attach, make_segment
from quorate.engines.shared.shared_memory import PAGE_BYTES


@pytest.fixture
def made() -> Iterator[tuple[Segment, SegmentAddress]]:
    segment, address = make_segment("node", PAGE_BYTES)
    yield segment, address
    segment.close()


def attached(address: SegmentAddress, node: str = "node") -> Segment:
    found = attach(address, node)
    assert found is not None
    return found


def test_what_one_writes_the_other_reads(made: tuple[Segment, SegmentAddress]) -> None:
    segment, address = made
    other = attached(address)
    other.block(3).fill_(7)  # whoever needs a block first makes it
    assert segment.block(3).tolist() == [7] * PAGE_BYTES
    assert segment.block(0).sum() == 0
    other.close()


def test_a_process_on_another_node_finds_nothing(made: tuple[Segment, SegmentAddress]) -> None:
    assert attach(made[1], "another node") is None


def test_a_process_that_is_gone_has_no_memory(made: tuple[Segment, SegmentAddress]) -> None:
    assert attach(made[1]._replace(pid=2**22 + 1), "node") is None


def test_another_file_of_the_same_number_is_not_taken_for_it(made: tuple[Segment, SegmentAddress]) -> None:
    assert attach(made[1]._replace(name="quorate-of-somebody-else"), "node") is None
