"""Whether a cluster has room: for the workers of a run, and for its objects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from quorate.engines.ray.cluster import Cluster, Demand, Node
from quorate.errors import BadInput

_LOOK_EVERY_S = 0.25
#: What an earlier run held is free again after a moment, which is waited for in any case.
_SETTLING_S = 5.0
_TINY = 1e-6  # Ray counts in 1/10,000; sums of such fractions are not exact


def check_room(
    cluster: Cluster, demand: Demand, workers: int, needed: int, wait_s: float, stopped: Callable[[], bool]
) -> int:
    """How many of the workers fit now, at least `needed`; BadInput when that many do not fit until the wait is over.

    Returns early, with what fits, when `stopped` says so.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as hints:
        asking = False
        while True:
            nodes = [node for node in cluster.nodes() if node.draining_by_s is None]
            free = _free(nodes)
            fits = sum(_fitting(demand, free[node.id], workers) for node in nodes)
            if fits >= needed or stopped():
                return min(workers, fits)
            waited_s = time.monotonic() - began
            possible = sum(_fitting(demand, node.resources, workers) for node in nodes) >= needed
            if waited_s >= max(wait_s, _SETTLING_S if possible else 0.0):
                raise _too_small(demand, workers, needed, fits, nodes, free, wait_s)
            if wait_s > 0 and not asking:
                hints.enter_context(_asking_for(demand, workers))
                asking = True
            time.sleep(_LOOK_EVERY_S)


def _fitting(demand: Demand, free: dict[str, float], most: int) -> int:
    """How many workers fit into what one node has."""
    rooms = [free.get(name, 0.0) / amount for name, amount in demand.as_resources().items()]
    return min([most, *(int(room + _TINY) for room in rooms)])


def _free(nodes: list[Node]) -> dict[str, dict[str, float]]:
    """What no other job holds, node by node."""
    import ray

    try:
        from ray._private.state import available_resources_per_node

        free: dict[str, dict[str, float]] = available_resources_per_node()
        return {node.id: free.get(node.id, {}) for node in nodes}
    except (ImportError, AttributeError):  # a Ray that tells the sum only
        left: dict[str, float] = dict(ray.available_resources())
        shared = {}
        for node in nodes:
            shared[node.id] = {name: min(amount, left.get(name, 0.0)) for name, amount in node.resources.items()}
            left = {name: amount - shared[node.id].get(name, 0.0) for name, amount in left.items()}
        return shared


@contextlib.contextmanager
def _asking_for(demand: Demand, workers: int) -> Iterator[None]:
    """While we wait, an autoscaler is told what would help; without one nobody listens."""
    from ray.autoscaler.sdk import request_resources

    with contextlib.suppress(Exception):
        request_resources(bundles=[demand.as_resources()] * workers)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            request_resources(bundles=[])


def _too_small(
    demand: Demand,
    workers: int,
    needed: int,
    fits: int,
    nodes: list[Node],
    free: dict[str, dict[str, float]],
    wait_s: float,
) -> BadInput:
    asked = " and ".join(_amount(name, amount) for name, amount in demand.as_resources().items()) or "nothing"
    there = []
    for name in demand.as_resources():
        total, left = (
            sum(what.get(name, 0.0) for what in of) for of in ([node.resources for node in nodes], free.values())
        )
        there.append(f"{_number(left)} of {_amount(name, total)} free")
    where = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    after = f" after {wait_s:g} s of waiting" if wait_s else ""
    remedy = "wait longer" if wait_s else "wait for nodes with wait_s= (--wait SECONDS)"
    return BadInput(
        f"the quorum needs {needed} workers of {asked} each, but the Ray cluster has room for {fits}{after}: "
        f"{', '.join(there) or 'no resources'} on {where}; take fewer workers, ask less for each (cpus=, gpus=, "
        f"resources=), or {remedy}"
    )


def _amount(name: str, amount: float) -> str:
    if name in ("CPU", "GPU"):
        return f"{_number(amount)} {name}{'' if amount == 1 else 's'}"
    return f"{_number(amount)} {name!r}"


def _number(amount: float) -> str:
    return f"{amount:.4f}".rstrip("0").rstrip(".") or "0"


# ---------------------------------------------------------------- objects


def check_object_store(cluster: Cluster, needed_bytes: int, what: str, nodes: set[str] | None = None) -> None:
    """BadInput when a node's object store cannot hold what the run keeps there (`what`, for the sentence).

    nodes: only these, by id; all without.
    """
    for node in cluster.nodes():
        if (nodes is None or node.id in nodes) and node.object_store_bytes < needed_bytes:
            raise BadInput(
                f"{what} take {_megabytes(needed_bytes)} of a node's object store, but that of node {node.address} "
                f"has {_megabytes(node.object_store_bytes)}; start Ray there with "
                f"--object-store-memory={needed_bytes} or more, or take a smaller model or more shards"
            )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size < 10e9 else f"{size / 1e9:,.1f} GB"
