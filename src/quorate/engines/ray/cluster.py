"""A connected Ray cluster: its nodes, which of them leave, and the checks that a run fits on them."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quorate.engines.ray.session import Session, end_connection, restore_variables
from quorate.engines.ray.task_transfer import VERSION, installed
from quorate.errors import BadInput, ClusterLost, install_line

INSTALL = install_line("ray")
_PORT_ANSWERS_S = 2.0
_POLL_S = 0.25
#: Minimum wait if the cluster is large enough: Ray frees the resources of an earlier run a moment after its end.
_SETTLING_S = 5.0
_ROUNDING = 1e-6  # Ray counts in units of 1/10,000, and sums of such fractions are not exact
#: A node that does not answer in time is probably still starting; its workers will report missing software.
_SOFTWARE_ANSWER_S = 30.0


class Demand(NamedTuple):
    """Resources that one worker takes of a node."""

    cpus: float
    gpus: float
    resources: dict[str, float]

    def as_resources(self) -> dict[str, float]:
        """By Ray's names, without zero amounts."""
        named = {"CPU": float(self.cpus), "GPU": float(self.gpus), **self.resources}
        return {name: amount for name, amount in named.items() if amount}


@dataclass(frozen=True)
class Node:
    """A live node. Ray can run several nodes on one machine."""

    id: str
    address: str
    resources: dict[str, float]
    object_store_bytes: int
    is_head: bool
    draining_by_s: float | None  # seconds until its announced end; None: none announced


class Cluster:
    """An open connection to a Ray cluster."""

    def __init__(self, session: Session | None, connected_here: bool) -> None:
        import ray

        self.variables_before: dict[str, str] | None = None  # environment to restore at the end
        self._session, self._connected_here = session, connected_here
        self._open = True
        self.driver_node: str = ray.get_runtime_context().get_node_id()
        self._raylet = _open_raylet()

    def nodes(self) -> list[Node]:
        """The live nodes."""
        import ray

        leaving = self.draining()
        found = []
        for described in ray.nodes():
            if described["Alive"]:
                resources = {str(name): float(amount) for name, amount in described["Resources"].items()}
                node = Node(
                    id=described["NodeID"],
                    address=described["NodeManagerAddress"],
                    resources=resources,
                    object_store_bytes=int(resources.get("object_store_memory", 0)),
                    is_head="node:__internal_head__" in resources,
                    draining_by_s=leaving.get(described["NodeID"]),
                )
                found.append(node)
        return found

    def draining(self) -> dict[str, float]:
        """Nodes that have announced their end (spot warning, drain): id -> seconds left, inf if there is no date."""
        try:
            from ray._private.state import state

            ends_ms: dict[str, int] = state.get_draining_nodes()
        except Exception:  # this Ray does not report it, or is shutting down: nodes then leave without notice
            return {}
        now = time.time()
        # Ray encodes "no date" as 0 or as the largest integer.
        return {
            node: max(0.0, at_ms / 1000 - now) if 0 < at_ms < 2**62 else math.inf for node, at_ms in ends_ms.items()
        }

    def answers(self, node: str) -> bool:
        """Whether a node is up. It tries the node's port, because Ray itself notices a dead node only seconds later."""
        import ray

        for described in ray.nodes():
            if described["NodeID"] == node and described["Alive"]:
                port = described["NodeManagerAddress"], described["NodeManagerPort"]
                try:
                    with socket.create_connection(port, timeout=_PORT_ANSWERS_S):
                        return True
                except OSError:
                    return False
        return False

    def check_raylet(self) -> None:
        """ClusterLost if the raylet of this machine is gone.

        Ray itself notices after some ten seconds, and may then end this process without a word.
        """
        if self._raylet is not None and select.select([self._raylet], [], [], 0)[0]:
            raise ClusterLost("Ray is gone from this machine (its raylet was killed, or had no memory left)")

    def close(self) -> None:
        """Stop a cluster started here, or close a connection made here. A connection made by the user stays."""
        if not self._open:
            return
        self._open = False
        if self._raylet is not None:
            os.close(self._raylet)
            self._raylet = None
        if self._session is not None:
            self._session.close()
        elif self._connected_here:
            end_connection()
        if self.variables_before is not None:
            restore_variables(self.variables_before)


def _open_raylet() -> int | None:
    """A pidfd of the raylet to which this process is connected; it is readable when the raylet ends.

    None if the raylet's process is not visible, for example from inside a container.
    """
    from ray._private.worker import global_worker

    name = getattr(global_worker.node, "raylet_socket_name", None)
    for process in Path("/proc").glob("[0-9]*") if name else ():
        with contextlib.suppress(OSError):
            if f"--raylet_socket_name={name}".encode() in (process / "cmdline").read_bytes().split(b"\0"):
                return os.pidfd_open(int(process.name))
    return None


# ---------------------------------------------------------------- room for workers


def check_room(
    cluster: Cluster, demand: Demand, workers: int, needed: int, wait_s: float, stopped: Callable[[], bool]
) -> int:
    """The number of workers that fit now; BadInput if fewer than `needed` fit after `wait_s`.

    Returns early, with the number that fits, as soon as `stopped` returns true.
    """
    began = time.monotonic()
    asking = False
    try:
        while True:
            nodes = [node for node in cluster.nodes() if node.draining_by_s is None]
            free = _free(nodes)
            fits = sum(_fitting(demand, free[node.id], workers) for node in nodes)
            if fits >= needed or stopped():
                return min(workers, fits)
            waited_s = time.monotonic() - began
            possible = sum(_fitting(demand, node.resources, workers) for node in nodes) >= needed
            if waited_s >= max(wait_s, _SETTLING_S if possible else 0.0):
                raise _too_small(demand, needed, fits, nodes, free, wait_s)
            if wait_s > 0 and not asking:
                asking = True
                _ask_autoscaler([demand.as_resources()] * workers)
            time.sleep(_POLL_S)
    finally:
        if asking:
            _ask_autoscaler([])


def _fitting(demand: Demand, free: dict[str, float], most: int) -> int:
    """How many workers fit into the resources of one node."""
    rooms = [free.get(name, 0.0) / amount for name, amount in demand.as_resources().items()]
    return min([most, *(int(room + _ROUNDING) for room in rooms)])


def _free(nodes: list[Node]) -> dict[str, dict[str, float]]:
    """The free resources of each node."""
    import ray

    try:
        from ray._private.state import available_resources_per_node

        free: dict[str, dict[str, float]] = available_resources_per_node()
        return {node.id: free.get(node.id, {}) for node in nodes}
    except (ImportError, AttributeError):  # this Ray reports only the sum over all nodes
        left: dict[str, float] = dict(ray.available_resources())
        shared = {}
        for node in nodes:
            shared[node.id] = {name: min(amount, left.get(name, 0.0)) for name, amount in node.resources.items()}
            left = {name: amount - shared[node.id].get(name, 0.0) for name, amount in left.items()}
        return shared


def _ask_autoscaler(bundles: list[dict[str, float]]) -> None:
    """Ask the cluster's autoscaler, if there is one, for room for these bundles; none withdraws the request."""
    from ray.autoscaler.sdk import request_resources

    with contextlib.suppress(Exception):
        request_resources(bundles=bundles)


def _too_small(
    demand: Demand, needed: int, fits: int, nodes: list[Node], free: dict[str, dict[str, float]], wait_s: float
) -> BadInput:
    asked = " and ".join(_amount(name, amount) for name, amount in demand.as_resources().items()) or "nothing"
    there = []
    for name in demand.as_resources():
        total = sum(node.resources.get(name, 0.0) for node in nodes)
        left = sum(resources.get(name, 0.0) for resources in free.values())
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


# ---------------------------------------------------------------- object store


def check_object_store(cluster: Cluster, needed_bytes: int, what: str) -> None:
    """BadInput if a node's object store is too small for the run's objects (`what` names them in the sentence)."""
    for node in cluster.nodes():
        if node.object_store_bytes < needed_bytes:
            raise BadInput(
                f"{what} take {_megabytes(needed_bytes)} of a node's object store, but that of node {node.address} "
                f"has {_megabytes(node.object_store_bytes)}; start Ray there with "
                f"--object-store-memory={needed_bytes} or more, or take a smaller model or more shards"
            )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size < 10e9 else f"{size / 1e9:,.1f} GB"


# ---------------------------------------------------------------- software


def check_software(cluster: Cluster) -> None:
    """BadInput if another node lacks quorate or torch, or has another quorate version."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    others = [node for node in cluster.nodes() if node.id != cluster.driver_node and node.draining_by_s is None]
    if not others:
        return
    # `installed` is sent with its code, because a node without quorate could not import it by name.
    module = sys.modules[installed.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(installed)
        answers = {}
        for node in others:
            only_there = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            answers[task.options(scheduling_strategy=only_there, name="quorate:installed").remote()] = node.address
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    ready, late = ray.wait(list(answers), num_returns=len(answers), timeout=_SOFTWARE_ANSWER_S)
    for reference in late:
        ray.cancel(reference, force=True)
    for reference in ready:
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError:
            continue  # the node has left; nodes leave all the time, and the run handles it
        check_installed(answers[reference], found)


def check_installed(address: str, found: dict[str, Any]) -> None:
    if found["quorate"] is None or not found["torch"]:
        lacking = "quorate" if found["quorate"] is None else "torch"
        raise BadInput(
            f"node {address} does not have {lacking}; install the run's quorate {VERSION} on every node with {INSTALL}"
        )
    if found["quorate"] != VERSION:
        raise BadInput(
            f"node {address} has quorate {found['quorate']}, but the run is of quorate {VERSION}; install the same on "
            f"every node with {INSTALL}"
        )
