"""Room for workers and objects: what fits, what is said when it does not, and waiting for it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.engines.ray import cluster
from quorate.engines.ray.cluster import Demand, Node, check_object_store, check_room
from quorate.errors import BadInput
from tests.engines.ray.conftest import ONE_CPU


class Machines:
    """A cluster of nodes as a test says; what is free may change from look to look."""

    def __init__(self, *nodes: dict[str, float], store_bytes: int = 10**9, leaving: tuple[int, ...] = ()) -> None:
        self.all = [
            Node(str(at), f"10.0.0.{at}", dict(has), store_bytes, at == 0, 30.0 if at in leaving else None)
            for at, has in enumerate(nodes)
        ]
        self.free = [{node.id: node.resources for node in self.all}]
        self.looks = 0

    def nodes(self) -> list[Node]:
        self.looks += 1
        return self.all

    def free_now(self, nodes: list[Node]) -> dict[str, dict[str, float]]:
        found = self.free[min(self.looks, len(self.free)) - 1]
        return {node.id: found[node.id] for node in nodes}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, float]]]:
    """Time passes a second a look; gives what the autoscaler was asked for."""
    asked: list[list[dict[str, float]]] = []
    seconds = itertools.count()
    monkeypatch.setattr(cluster.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", lambda bundles: asked.append(bundles))
    return asked


def fit(machines: Machines, demand: Demand, workers: int, needed: int, wait_s: float = 0.0, **other: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_free", machines.free_now)
        stopped = other.get("stopped", lambda: False)
        return check_room(machines, demand, workers, needed, wait_s, stopped)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (Demand(1.0, 0.0, {}), 5),
        (Demand(2.0, 0.0, {}), 2),  # 4 CPUs hold two, the CPU that is left on each node holds none
        (Demand(0.1, 0.0, {}), 50),
        (Demand(0.5, 1.0, {}), 2),
        (Demand(0.0, 0.25, {}), 8),
        (Demand(1.0, 0.0, {"spot": 0.5}), 1),
        (Demand(0.0, 0.0, {}), 100),
    ],
)
def test_workers_fit_node_by_node(demand: Demand, expected: int) -> None:
    machines = Machines({"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0, "spot": 1.0})
    assert fit(machines, demand, 100, 1) == min(100, expected)


@given(
    st.lists(st.floats(0, 64), min_size=1, max_size=6),
    st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.5, 3.0]),
    st.integers(1, 80),
)
def test_what_fits_never_takes_more_than_there_is(cpus: list[float], each: float, workers: int) -> None:
    machines = Machines(*({"CPU": has} for has in cpus))
    fits = fit(machines, Demand(each, 0.0, {}), workers, 0)
    assert fits <= workers
    assert fits == min(workers, sum(math.floor(has / each + 1e-6) for has in cpus))


def test_too_little_room_says_what_there_is_and_what_is_asked() -> None:
    with pytest.raises(BadInput) as caught:
        fit(Machines({"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}), Demand(1.0, 0.5, {"spot": 1.0}), 8, 6)
    assert str(caught.value) == (
        "the quorum needs 6 workers of 1 CPU and 0.5 GPUs and 1 'spot' each, but the Ray cluster has room for 0: "
        "5 of 5 CPUs free, 1 of 1 GPU free, 0 of 0 'spot' free on 2 nodes; take fewer workers, ask less for each "
        "(cpus=, gpus=, resources=), or wait for nodes with wait_s= (--wait SECONDS)"
    )


def test_a_node_that_leaves_is_no_room() -> None:
    with pytest.raises(BadInput, match="room for 4: 4 of 4 CPUs free on 1 node"):
        fit(Machines({"CPU": 4.0}, {"CPU": 4.0}, leaving=(1,)), ONE_CPU, 8, 6)


def test_what_an_earlier_run_still_holds_is_waited_for_a_moment() -> None:
    machines = Machines({"CPU": 4.0})
    machines.free = [{"0": {"CPU": 1.0}}, {"0": {"CPU": 2.0}}, {"0": {"CPU": 4.0}}]
    assert fit(machines, ONE_CPU, 4, 4) == 4
    assert machines.looks == 3


def test_what_another_job_holds_is_taken() -> None:
    machines = Machines({"CPU": 4.0})
    machines.free = [{"0": {"CPU": 1.0}}]
    with pytest.raises(BadInput, match="room for 1: 1 of 4 CPUs free on 1 node"):
        fit(machines, ONE_CPU, 4, 3)


def test_nodes_that_come_while_we_wait(no_waiting: list[list[dict[str, float]]]) -> None:
    machines = Machines({"CPU": 1.0})
    later = Machines({"CPU": 1.0}, {"CPU": 8.0})

    def nodes() -> list[Node]:
        machines.looks += 1
        return machines.all if machines.looks < 20 else later.all

    machines.nodes = nodes  # type: ignore[method-assign]
    machines.free = later.free
    assert fit(machines, ONE_CPU, 8, 6, wait_s=60.0) == 8
    assert no_waiting == [[{"CPU": 1.0}] * 8, []]  # asked for once, and taken back


def test_the_time_waited_is_told(no_waiting: list[list[dict[str, float]]]) -> None:
    with pytest.raises(BadInput, match=r"room for 1 after 30 s of waiting: .* or wait longer"):
        fit(Machines({"CPU": 1.0}), ONE_CPU, 8, 6, wait_s=30.0)
    assert no_waiting[-1] == []


def test_a_stop_ends_the_wait() -> None:
    answers = iter([False, False, True])
    assert fit(Machines({"CPU": 1.0}), ONE_CPU, 8, 6, wait_s=math.inf, stopped=lambda: next(answers)) == 1


def test_an_object_store_too_small_is_a_figure_and_a_remedy() -> None:
    machines: Any = Machines({}, {}, store_bytes=200_000_000)
    check_object_store(machines, 200_000_000, "3 versions of the model")
    with pytest.raises(BadInput) as caught:
        check_object_store(machines, 1_500_000_000, "3 versions of the model")
    assert str(caught.value) == (
        "3 versions of the model take 1,500 MB of a node's object store, but that of node 10.0.0.0 has 200 MB; start "
        "Ray there with --object-store-memory=1500000000 or more, or take a smaller model or more shards"
    )
