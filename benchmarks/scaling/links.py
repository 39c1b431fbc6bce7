"""What an update moves over each machine's link, and the seconds that takes: one server, shards, all-reduce.

On paper: bytes over a rate plus latencies, nothing measured. Every link carries its rate in both directions at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quorate.errors import BadInput, check_at_least

FP32_BYTES, HALF_BYTES = 4, 2  # of a parameter on the wire


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one update asks of the network: n workers read a version, and a gradient comes back from each."""

    workers: int  # n = N + b
    version_bytes: float
    gradient_bytes: float
    backups: int = 0  # b: the update needs the first N = n - b gradients
    per_node: int = 1  # workers on one machine; they share its link, and one transfer of the version

    def __post_init__(self) -> None:
        check_at_least("workers", self.workers, 1)
        check_at_least("backups", self.backups, 0)
        check_at_least("per_node", self.per_node, 1)
        if self.backups >= self.workers:
            raise BadInput(f"backups is {self.backups} of {self.workers} workers; leave at least one for the quorum")
        if self.workers % self.per_node:
            raise BadInput(f"{self.workers} workers cannot be {self.per_node} on each machine; give a multiple of it")
        if not (self.version_bytes > 0 and self.gradient_bytes > 0):
            raise BadInput("a version and a gradient must have more than 0 bytes")

    @property
    def quorum(self) -> int:
        return self.workers - self.backups

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Every machine's link."""

    bytes_per_s: float  # each direction
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise BadInput(
                f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s of latency cannot be; "
                f"give a rate above 0 and a latency from 0 up"
            )


class Traffic(NamedTuple):
    """Bytes of one update through one link: that of the busiest server, and that of a machine with workers.

    Where servers sit on the workers' machines the two are one link, and both pairs are what it carries in all.
    """

    server_out: float
    server_in: float
    node_in: float
    node_out: float

    @property
    def busiest(self) -> float:
        """Most bytes that one link carries in one direction."""
        return max(self)


# ------------------------------------------------------------ servers, each with a shard of the model


def server_traffic(load: Load, shards: int = 1, *, on_workers: bool = False, sent: int | None = None) -> Traffic:
    """S servers hold 1/S of the model each (S = 1: one server).

    A server sends its piece to every machine and gets a piece of every gradient that is `sent`: all n unless late
    ones give up before they send, and at least N. On the workers' machines (`on_workers`) a machine keeps its own
    piece, and its link carries both roles; with S below the machines, those with a shard are the busiest.
    """
    sent = _sent(load, sent)
    _check_shards(load, shards, on_workers)
    version, gradient, own = load.version_bytes, load.gradient_bytes, load.per_node
    if not on_workers:
        return Traffic(load.nodes * version / shards, sent * gradient / shards, version, own * gradient)
    others = 1 - 1 / shards  # of the model lies elsewhere
    out = (load.nodes - 1) * version / shards + own * gradient * others
    inward = max(sent - own, 0) * gradient / shards + version * others
    return Traffic(out, inward, inward, out)


def shared_s(load: Load, rate: Rate, shards: int = 1, *, on_workers: bool = False, sent: int | None = None) -> float:
    """Seconds of communication where a link is shared fairly: all have the version at once, all gradients come at once.

    max(n/S, 1)·V/B + max(n/S, 1)·G/B + 2·latency with one worker a machine. On the workers' machines the two roles
    fall into different directions of a link in each of the two phases, so they do not delay each other.
    """
    sent = _sent(load, sent)
    _check_shards(load, shards, on_workers)
    others = 1 - 1 / shards if on_workers else 1.0
    nodes = load.nodes - 1 if on_workers else load.nodes
    arriving = max(sent - load.per_node, 0) if on_workers else sent
    # A machine without a shard has the whole model to carry, one with a shard only the rest of it.
    whole = others if on_workers and shards == load.nodes else 1.0
    out = load.version_bytes * max(nodes / shards, whole)
    inward = load.gradient_bytes * max(arriving / shards, whole * load.per_node)
    return (out + inward) / rate.bytes_per_s + 2 * rate.latency_s


def queued_s(load: Load, rate: Rate, shards: int = 1, compute_s: float = 0.0) -> float:
    """Seconds of an update where a server serves one transfer after the other, as in the simulator.

    Exact when every worker computes for `compute_s`, one worker a machine, servers on machines of their own: the first
    that get the version are the first to send, so gradients come in while versions still go out. With o and i seconds
    of a version and a gradient at a server, v and g at the worker's link, the N-th gradient is in after

        compute + 2·latency + max( max(N·o, v) + max(i, g),  max(o, v) + N·i )

    and no update is quicker than the n versions that each must send, n·o.
    """
    if load.per_node != 1:
        raise BadInput(f"{load.per_node} workers a machine: one after the other is counted for 1 only; use shared_s")
    _check_shards(load, shards, on_workers=False)
    v, g = load.version_bytes / rate.bytes_per_s, load.gradient_bytes / rate.bytes_per_s
    o, i = v / shards, g / shards
    through = max(max(load.quorum * o, v) + max(i, g), max(o, v) + load.quorum * i)
    return max(compute_s + 2 * rate.latency_s + through, load.workers * o)


def fewest_shards(load: Load, rate: Rate, within_s: float) -> int | None:
    """The fewest servers of their own with which communication, links shared fairly, takes no longer than this.

    None: no number does, since workers' own links take longer. More shards than machines with workers never help.
    """
    low, high = 1, load.nodes
    if shared_s(load, rate, high) > within_s:
        return None
    while low < high:  # seconds fall as shards are added
        middle = (low + high) // 2
        low, high = (low, middle) if shared_s(load, rate, middle) <= within_s else (middle + 1, high)
    return low


# ------------------------------------------------------------ all-reduce


def ring_bytes(load: Load) -> float:
    """Bytes of a gradient's ring all-reduce through each machine's link, each direction: 2·G·(m-1)/m over m machines.

    Workers of one machine add up among themselves first. Backups change nothing: who is late passes on zeros.
    """
    return 2 * load.gradient_bytes * (load.nodes - 1) / load.nodes


def ring_s(load: Load, rate: Rate) -> float:
    """Seconds of it: 2(m-1) steps, each with its latency."""
    return ring_bytes(load) / rate.bytes_per_s + 2 * (load.nodes - 1) * rate.latency_s


# ------------------------------------------------------------ what else a shard needs


def shard_memory_bytes(
    load: Load, shards: int, *, optimizer_states: int, versions_alive: int, unsummed: int = 1
) -> float:
    """Memory of one shard: versions that somebody may still read, the optimizer's states, the sum, and gradients
    that are in but not yet added (at most n of them, if the sum does not keep up)."""
    _check_shards(load, shards, on_workers=False)
    versions = (versions_alive + optimizer_states + 1) * load.version_bytes
    return (versions + unsummed * load.gradient_bytes) / shards


def even_shards(largest_tensor: int, parameters: int) -> int:
    """The most shards of equal size where no tensor is cut: beyond, the largest tensor's server stays the busiest."""
    return max(1, parameters // largest_tensor)


def _sent(load: Load, sent: int | None) -> int:
    if sent is None:
        return load.workers
    if not load.quorum <= sent <= load.workers:
        raise BadInput(f"sent is {sent}, but from {load.quorum} to {load.workers} gradients are sent for an update")
    return sent


def _check_shards(load: Load, shards: int, on_workers: bool) -> None:
    check_at_least("shards", shards, 1)
    if on_workers and shards > load.nodes:
        raise BadInput(f"{shards} shards do not fit on {load.nodes} machines, one each; give at most {load.nodes}")
