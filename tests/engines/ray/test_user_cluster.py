"""A Ray that the user's script is connected to: used, and left as it was."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from quorate.engines.ray import cluster as cluster_module
from quorate.engines.ray.cluster import Cluster, check_room
from quorate.engines.ray.connection import connect, reach
from quorate.errors import BadInput
from tests.engines.ray.conftest import ONE_CPU

pytestmark = pytest.mark.ray


def test_it_is_used_and_stays_open(cluster: Cluster) -> None:
    import ray

    for address in (None, "auto", ray.get_runtime_context().gcs_address):
        second = connect(address=address, workers=2, demand=ONE_CPU)
        assert second._session is None and second.driver_node == cluster.driver_node
        second.close()
        assert ray.is_initialized()


def test_another_address_is_refused(cluster: Cluster) -> None:
    with pytest.raises(BadInput, match=r"but this process is connected to Ray at 127\.0\.0\.1:\d+; leave it away"):
        connect(address="10.0.0.1:6379", workers=1, demand=ONE_CPU)


def test_its_environment_cannot_be_changed_any_more(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has called ray\.init already; give them there"):
        connect(address=None, workers=1, demand=ONE_CPU, working_dir=str(tmp_path))


IN_A_MINUTE = 60_000  # in ms, from now
NO_DATE = [(0, math.inf), (2**63 - 1, math.inf)]  # as Ray writes it


@pytest.mark.parametrize(("at_ms", "left_s"), [*NO_DATE, (1, 0.0)])
def test_nodes_that_leave(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, at_ms: int, left_s: float) -> None:
    from ray._private.state import state

    monkeypatch.setattr(state, "get_draining_nodes", lambda: {cluster.driver_node: at_ms})
    assert cluster.draining() == {cluster.driver_node: left_s}
    assert [node.draining_by_s for node in cluster.nodes()] == [left_s]


def test_a_node_that_leaves_soon(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.state import state

    at_ms = time.time() * 1000 + IN_A_MINUTE
    monkeypatch.setattr(state, "get_draining_nodes", lambda: {cluster.driver_node: at_ms})
    assert 0 < cluster.draining()[cluster.driver_node] <= 60


def test_a_ray_that_does_not_tell_who_leaves(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.state import GlobalState

    monkeypatch.delattr(GlobalState, "get_draining_nodes")
    assert cluster.draining() == {}


def test_a_cluster_that_asks_for_a_token_gets_none_of_ours(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for real: the Ray of these tests has a token that nobody but this process knows."""
    import ray

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    address = ray.get_runtime_context().gcs_address
    with pytest.raises(BadInput, match=f"{address} asks for a token.*RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"):
        reach(address)


def test_actors_take_room_for_real(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    @ray.remote(num_cpus=3)
    class Holder:
        def here(self) -> bool:
            return True

    holder = Holder.remote()
    assert ray.get(holder.here.remote())
    while cluster_module._free(cluster.nodes())[cluster.driver_node].get("CPU") != 1.0:  # Ray counts a moment later
        time.sleep(0.05)
    monkeypatch.setattr(cluster_module, "_SETTLING_S", 0.5)
    with pytest.raises(BadInput, match="room for 1: 1 of 4 CPUs free"):
        check_room(cluster, ONE_CPU, 4, 2, 0.0, lambda: False)
    ray.kill(holder)
    monkeypatch.setattr(cluster_module, "_SETTLING_S", 60.0)  # it is free again a moment later, on a busy machine too
    assert check_room(cluster, ONE_CPU, 6, 4, 0.0, lambda: False) == 4
