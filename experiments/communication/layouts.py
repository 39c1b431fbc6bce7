"""How versions and gradients travel: over one server, over shards, or around a ring."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.scaling.links import Load, Rate, ring_s

from quorate.network import Network

#: 25M parameters in fp32, as an Inception or a ResNet-50 has.
MODEL_BYTES = 100_000_000
#: Every machine's link, each direction, and its latency.
LINK_BYTES_PER_S = 10e9 / 8
LATENCY_S = 50e-6

ALL_REDUCE = "all-reduce"
FREE = "free network"


class Layout(NamedTuple):
    """One way; `shards` 0 where there is no server."""

    name: str
    shards: int

    def network(self) -> Network | None:
        """The simulator's network: None where it costs nothing there."""
        if not self.shards:
            return None
        return Network(
            bandwidth=LINK_BYTES_PER_S, server_bandwidth=LINK_BYTES_PER_S, latency_s=LATENCY_S, shards=self.shards
        )


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(FREE, 0),
        Layout("one server", 1),
        Layout("10 shards", 10),
        Layout("80 shards", 80),
        Layout(ALL_REDUCE, 0),
    )
}


def ring_seconds(machines: int) -> float:
    """Seconds of a ring all-reduce of a gradient among so many: 2·(n−1)/n·G/B + 2·(n−1)·latency, on paper."""
    load = Load(workers=machines, version_bytes=MODEL_BYTES, gradient_bytes=MODEL_BYTES)
    return ring_s(load, Rate(bytes_per_s=LINK_BYTES_PER_S, latency_s=LATENCY_S))


def ring_bytes(machines: int) -> float:
    """Bytes of one all-reduce over all links: every machine sends 2·(n−1)/n gradients."""
    return 2.0 * (machines - 1) * MODEL_BYTES
