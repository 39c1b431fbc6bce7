"""Bytes and seconds on paper: by hand, by counting every transfer, and against the simulator."""

from __future__ import annotations

import ast
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from benchmarks.scaling import links
from benchmarks.scaling.links import Load, Rate, Traffic
from hypothesis import given, settings
from hypothesis import strategies as st

import quorate
from quorate.network import Network
from quorate.planning import plan


def load(**changes: Any) -> Load:
    return Load(**{"workers": 6, "version_bytes": 600.0, "gradient_bytes": 300.0, **changes})


# ------------------------------------------------------------ bytes


@pytest.mark.parametrize(("shards", "per_node", "on_workers"), list(product((1, 2, 3, 4), (1, 2), (False, True))))
def test_every_transfer_counted_one_by_one(shards: int, per_node: int, on_workers: bool) -> None:
    """Each shard's piece to each machine, each worker's piece to each shard; what stays on a machine is no traffic."""
    one = load(workers=8, per_node=per_node)
    nodes = [f"node {number}" for number in range(one.nodes)]
    servers = nodes[:shards] if on_workers else [f"server {number}" for number in range(shards)]
    moved = {place: [0.0, 0.0] for place in {*nodes, *servers}}  # out, in

    def move(start: str, end: str, size: float) -> None:
        if start != end:
            moved[start][0] += size
            moved[end][1] += size

    for server, node in product(servers, nodes):
        move(server, node, one.version_bytes / shards)
        for _ in range(per_node):
            move(node, server, one.gradient_bytes / shards)
    found = links.server_traffic(one, shards, on_workers=on_workers)
    assert (found.server_out, found.server_in) == pytest.approx(moved[servers[0]])
    assert (found.node_out, found.node_in) == pytest.approx(moved[nodes[0]])
    assert found.busiest == pytest.approx(max(max(pair) for pair in moved.values()))


def test_ring_counted_step_by_step() -> None:
    """Every machine passes a piece on in each of 2(m-1) steps."""
    assert links.ring_bytes(load()) == pytest.approx(sum(300 / 6 for _ in range(2 * 5)))
    assert links.ring_bytes(load(per_node=3)) == pytest.approx(300)  # two machines, two pieces, two steps
    assert links.ring_bytes(load(per_node=6)) == 0
    assert links.ring_bytes(load(backups=2)) == links.ring_bytes(load())
    assert links.ring_s(load(), Rate(bytes_per_s=100, latency_s=0.5)) == pytest.approx(5 + 10 * 0.5)


def test_a_shard_on_every_machine_moves_what_a_ring_does() -> None:
    for workers in (2, 7, 100):
        one = load(workers=workers, gradient_bytes=600.0)
        rate = Rate(bytes_per_s=1e3)
        assert links.server_traffic(one, workers, on_workers=True).busiest == pytest.approx(links.ring_bytes(one))
        assert links.shared_s(one, rate, workers, on_workers=True) == pytest.approx(links.ring_s(one, rate))


def test_late_gradients_that_are_not_sent_save_their_bytes() -> None:
    one = load(backups=2)
    assert links.server_traffic(one) == Traffic(3600, 1800, 600, 300)
    assert links.server_traffic(one, sent=4).server_in == 4 * 300


# ------------------------------------------------------------ seconds


def test_fair_shares_by_hand() -> None:
    rate = Rate(bytes_per_s=100, latency_s=0.5)
    assert links.shared_s(load(), rate) == pytest.approx(6 * 6 + 6 * 3 + 1)
    assert links.shared_s(load(), rate, 3) == pytest.approx(2 * 6 + 2 * 3 + 1)
    assert links.shared_s(load(), rate, 6) == links.shared_s(load(), rate, 60) == pytest.approx(6 + 3 + 1)
    assert links.shared_s(load(), rate, 3, on_workers=True) == pytest.approx(5 / 3 * (6 + 3) + 1)
    # Of six machines one has no shard, and carries the whole gradient, though those with one need not.
    assert links.shared_s(load(), rate, 5, on_workers=True) == pytest.approx(6 + 3 + 1)
    assert links.shared_s(load(backups=2), rate, 5, on_workers=True, sent=4) == pytest.approx(6 + 3 + 1)
    assert links.shared_s(load(per_node=2), rate) == pytest.approx(3 * 6 + 6 * 3 + 1)
    assert links.shared_s(load(per_node=2), rate, 3) == pytest.approx(6 + 2 * 3 + 1)


def played(one: Load, rate: Rate, shards: int, compute_s: float) -> float:
    """The first round, transfer by transfer."""
    out_free = in_free = 0.0
    ready, arrivals = [], []
    for _ in range(one.workers):
        out_free += one.version_bytes / shards / rate.bytes_per_s
        ready.append(max(out_free, one.version_bytes / rate.bytes_per_s) + rate.latency_s + compute_s)
    for time in ready:
        in_free = max(in_free, time) + one.gradient_bytes / shards / rate.bytes_per_s
        arrivals.append(max(in_free, time + one.gradient_bytes / rate.bytes_per_s) + rate.latency_s)
    return max(arrivals[one.quorum - 1], one.workers * one.version_bytes / shards / rate.bytes_per_s)


SECONDS = st.floats(1e-3, 1e3)


@given(
    workers=st.integers(1, 40),
    backups=st.integers(0, 39),
    shards=st.integers(1, 50),
    version=SECONDS,
    gradient=SECONDS,
    latency=st.sampled_from([0.0, 0.01, 1.0]),
    compute=SECONDS,
)
def test_one_after_the_other_for_any_sizes(
    workers: int, backups: int, shards: int, version: float, gradient: float, latency: float, compute: float
) -> None:
    one = Load(
        workers=workers, backups=min(backups, workers - 1), version_bytes=version, gradient_bytes=gradient
    )  # at 1 byte/s
    rate = Rate(bytes_per_s=1, latency_s=latency)
    assert links.queued_s(one, rate, shards, compute) == pytest.approx(played(one, rate, shards, compute))


@settings(max_examples=40)
@given(
    workers=st.integers(1, 24),
    backups=st.integers(0, 23),
    shards=st.sampled_from([1, 2, 5, 24]),
    size=st.integers(1, 10**7),
    compute=st.floats(1e-3, 10),
    latency=st.sampled_from([0.0, 0.001, 0.05]),
)
def test_one_after_the_other_is_the_simulators(
    workers: int, backups: int, shards: int, size: int, compute: float, latency: float
) -> None:
    """Rounds 11 to 30: what cancelled workers left in the queues is part of it."""
    backups = min(backups, workers - 1)
    bandwidth = 2e6
    network = Network(bandwidth=bandwidth, server_bandwidth=bandwidth, latency_s=latency, shards=shards)

    def end(updates: int) -> float:
        engine = quorate.Simulated(workers, f"constant:{compute}", network=network, model_bytes=size)
        policy = quorate.BackupSync(workers - backups, backups)
        return float(quorate.train(None, policy, engine, updates=updates).summary["seconds"])

    one = Load(workers=workers, backups=backups, version_bytes=size, gradient_bytes=size)
    paper = links.queued_s(one, Rate(bytes_per_s=bandwidth, latency_s=latency), shards, compute)
    assert (end(30) - end(10)) / 20 == pytest.approx(paper, rel=1e-6)


@given(workers=st.integers(1, 300), within=st.floats(0.01, 1e4))
def test_the_fewest_shards_are_enough_and_one_fewer_is_not(workers: int, within: float) -> None:
    one, rate = load(workers=workers), Rate(bytes_per_s=100, latency_s=0.01)
    found = links.fewest_shards(one, rate, within)
    if found is None:
        assert all(links.shared_s(one, rate, shards) > within for shards in (1, workers, 10 * workers))
    else:
        assert links.shared_s(one, rate, found) <= within
        assert found == 1 or links.shared_s(one, rate, found - 1) > within


def test_memory_by_hand() -> None:
    """Two versions, two states and a sum of 600, one gradient of 300, in three shards."""
    assert links.shard_memory_bytes(load(), 3, optimizer_states=2, versions_alive=2) == (5 * 600 + 300) / 3
    assert links.even_shards(largest_tensor=30, parameters=100) == 3
    assert links.even_shards(largest_tensor=100, parameters=100) == 1


# ------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: load(workers=0), "workers is 0, but it must be at least 1"),
        (lambda: load(backups=6), "backups is 6 of 6 workers; leave at least one"),
        (lambda: load(per_node=4), "6 workers cannot be 4 on each machine"),
        (lambda: load(version_bytes=0), "more than 0 bytes"),
        (lambda: Rate(bytes_per_s=0), "give a rate above 0"),
        (lambda: links.server_traffic(load(), 0), "shards is 0"),
        (lambda: links.server_traffic(load(), 7, on_workers=True), "7 shards do not fit on 6 machines"),
        (lambda: links.server_traffic(load(backups=2), sent=3), "sent is 3, but from 4 to 6 gradients"),
        (lambda: links.queued_s(load(per_node=2), Rate(bytes_per_s=1)), "use shared_s"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(quorate.BadInput, match=says):
        wrong()


def test_the_formulas_need_the_standard_library_alone() -> None:
    tree = ast.parse(Path(links.__file__).read_text(encoding="utf-8"))
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "quorate"}
    assert {name for name in names if name.startswith("quorate")} == {"quorate.errors"}


def test_the_planner_knows_shards_as_the_simulator_does() -> None:
    text = "bandwidth=1Gbps,server=1Gbps,shards=3,latency=1ms"
    engine = quorate.Simulated(6, "constant:0.5", network=text, model_bytes=9_000_000)
    run = quorate.train(None, quorate.FullSync(), engine, updates=10)
    made = plan(latency="constant:0.5", machines=6, model_bytes=9_000_000, what_if=[text, "server=1Gbps"])
    all_six = {
        change: next(split.mean for split in other.splits if split.quorum == 6) for change, other in made.what_if
    }
    assert all_six[text] == pytest.approx(run.summary["seconds"] / 10)
    assert all_six["server=1Gbps"] > all_six[text]
