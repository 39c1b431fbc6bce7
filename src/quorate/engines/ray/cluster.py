"""A Ray cluster, found or started: its nodes, what they have, and which of them are about to leave."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quorate.engines.ray import security
from quorate.engines.ray.environment import checked_environment
from quorate.engines.ray.printing import prints_to_stderr
from quorate.engines.ray.reaching import reach
from quorate.engines.ray.starting import (
    Session,
    end_connection,
    first_line,
    loopback_only,
    restore_variables,
    untouched_signals,
)
from quorate.errors import BadInput

_ANSWER_S = 2.0
INSTALL = "pip install 'quorate[ray]'"


class Demand(NamedTuple):
    """What one worker takes of a node."""

    cpus: float
    gpus: float
    resources: dict[str, float]

    def as_resources(self) -> dict[str, float]:
        """In Ray's names; what is not needed is left out."""
        named = {"CPU": float(self.cpus), "GPU": float(self.gpus), **self.resources}
        return {name: amount for name, amount in named.items() if amount}


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, or what Ray takes for one."""

    id: str
    address: str
    resources: dict[str, float]
    object_store_bytes: int
    is_head: bool
    draining_by_s: float | None  # seconds until its announced end; None: it stays


class Cluster:
    """An open connection to a Ray cluster."""

    def __init__(self, session: Session | None, connected_here: bool) -> None:
        import ray

        self.variables_before: dict[str, str] | None = None  # the environment is put back as it was
        self._session, self._connected_here = session, connected_here
        self._open = True
        self.driver_node: str = ray.get_runtime_context().get_node_id()

    @property
    def started_here(self) -> bool:
        """Whether it is one of our own, which ends with `close`."""
        return self._session is not None

    def nodes(self) -> list[Node]:
        """Those that are alive."""
        import ray

        leaving = self.draining()
        return [_node(described, leaving) for described in ray.nodes() if described["Alive"]]

    def draining(self) -> dict[str, float]:
        """Nodes that have announced their end (a spot warning, a drain): id -> seconds left, inf without a date."""
        try:
            from ray._private.state import state

            ends_ms: dict[str, int] = state.get_draining_nodes()
        except Exception:  # a Ray that does not tell, or is just going: its nodes then leave without notice
            return {}
        now = time.time()
        # Ray writes "no date" as 0 or as the largest number.
        return {
            node: max(0.0, at_ms / 1000 - now) if 0 < at_ms < 2**62 else math.inf for node, at_ms in ends_ms.items()
        }

    def answers(self, node: str) -> bool:
        """Whether a node is there. Its port says so at once, where Ray itself takes seconds to notice."""
        import ray

        for described in ray.nodes():
            if described["NodeID"] == node and described["Alive"]:
                place = described["NodeManagerAddress"], described["NodeManagerPort"]
                try:
                    with socket.create_connection(place, timeout=_ANSWER_S):
                        return True
                except OSError:
                    return False
        return False

    def close(self) -> None:
        """End what was begun here: a Ray of our own, or our connection. A connection the user made stays."""
        if not self._open:
            return
        self._open = False
        if self._session is not None:
            self._session.close()
        elif self._connected_here:
            end_connection()
        if self.variables_before is not None:
            restore_variables(self.variables_before)


def _node(described: dict[str, Any], leaving: Mapping[str, float]) -> Node:
    resources = {str(name): float(amount) for name, amount in described["Resources"].items()}
    return Node(
        id=described["NodeID"],
        address=described["NodeManagerAddress"],
        resources=resources,
        object_store_bytes=int(resources.get("object_store_memory", 0)),
        is_head="node:__internal_head__" in resources,
        draining_by_s=leaving.get(described["NodeID"]),
    )


# ---------------------------------------------------------------- connecting


def connect(
    *,
    address: str | None,
    workers: int,
    demand: Demand,
    runtime_env: dict[str, Any] | None = None,
    working_dir: str | None = None,
    extra: Mapping[str, float] | None = None,
    object_store_bytes: int | None = None,
) -> Cluster:
    """The cluster at an address, the one this process is connected to, or one started here for this run.

    extra: what a cluster started here must have beside the workers' demand, in Ray's names (shards, keeper).
    object_store_bytes: how large the object store of a cluster started here is.
    """
    variables = dict(os.environ)
    ray = ray_module()
    environment = checked_environment(runtime_env, working_dir)
    if ray.is_initialized():
        return _already_connected(address, environment)
    try:
        cluster = _opened(address, workers, demand, environment, extra or {}, object_store_bytes)
    except BaseException:
        restore_variables(variables)
        raise
    cluster.variables_before = variables
    return cluster


def _opened(
    address: str | None,
    workers: int,
    demand: Demand,
    environment: dict[str, Any],
    extra: Mapping[str, float],
    store_bytes: int | None,
) -> Cluster:
    from_environment = address is None
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or None  # set inside a Ray job, too
    settings: dict[str, Any] = {
        "runtime_env": environment or None,
        "configure_logging": False,
        "logging_level": logging.ERROR,
        "log_to_driver": True,
    }
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None or address == "local":
        return _started(workers, demand, extra, store_bytes, settings)
    try:
        return _connected(address, settings)
    except BadInput as error:
        if not from_environment:
            raise
        raise BadInput(f"{error} (this address is from RAY_ADDRESS)") from error


def ray_module() -> Any:
    """Ray, or the sentence that says how to get it."""
    try:
        import ray
    except ImportError as error:
        if error.name != "ray":
            raise BadInput(f"Ray cannot be imported: {error}; install it again with: {INSTALL}") from error
        raise BadInput(f"the Ray engine needs Ray, which is not installed: {INSTALL}") from None
    return ray


def _already_connected(address: str | None, environment: dict[str, Any]) -> Cluster:
    """The connection that the user's script made with ray.init."""
    import ray

    if ray.util.client.ray.is_connected():
        raise BadInput(
            "this process is connected through Ray's client protocol (ray://), through which workers cannot share "
            "memory with the run; submit it with `ray job submit`, or connect on a node of the cluster"
        )
    connected_to = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", "local", connected_to):
        raise BadInput(f"address is {address!r}, but this process is connected to Ray at {connected_to}; leave it away")
    if environment:
        raise BadInput(
            "runtime_env and working_dir cannot be set any more, since this process has called ray.init already; "
            "give them there: ray.init(runtime_env={'working_dir': …})"
        )
    return Cluster(None, connected_here=False)


def _started(
    workers: int, demand: Demand, extra: Mapping[str, float], store_bytes: int | None, settings: dict[str, Any]
) -> Cluster:
    """A Ray on this machine with room for the run: more CPUs than there are cores is fine, as in the local engine."""
    session = Session()
    names = demand.resources.keys() | (extra.keys() - {"CPU", "GPU"})
    resources = {name: demand.resources.get(name, 0.0) * workers + extra.get(name, 0.0) for name in names}
    cpus = demand.cpus * workers + extra.get("CPU", 0.0)
    try:
        with _sentences():
            session.start(cpus=cpus, resources=resources, object_store_bytes=store_bytes, **settings)
        prints_to_stderr()
        return Cluster(session, connected_here=True)
    except BaseException:
        session.close()
        raise


def _connected(address: str, settings: dict[str, Any]) -> Cluster:
    import ray

    found = reach(address)
    places = security.reachable_places(found.address, found.nodes, found.dashboard)
    security.warn_if_open(places, found.takes_anyone)
    try:
        with _sentences(), loopback_only(found.on_loopback), untouched_signals():
            ray.init(address=found.address, **settings)
        prints_to_stderr()
        return Cluster(None, connected_here=True)
    except BaseException:
        end_connection()
        raise


class _sentences:  # noqa: N801 - it reads as what it gives
    """Errors of ray.init in words a person can act on."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, BadInput):
            return
        text, said = str(error), first_line(error)
        if "Failed to merge the Job" in text:
            raise BadInput(
                "the run and the Ray job it runs in both name a runtime_env or working_dir; give it once, to "
                "`ray job submit`"
            ) from error
        size = re.search(r"\(([^()]*)\) exceeds the maximum size of (\S+)\.", text)
        if size is not None:
            raise BadInput(
                f"the working_dir has {size[1]}, and Ray sends at most {size[2]} to the nodes; keep large files out of "
                f"it (runtime_env={{'excludes': […]}}, a .gitignore), or put them where every node reads them"
            ) from error
        if type(error).__name__ == "RuntimeEnvSetupError":
            why = text.partition("\n")[2].partition("\n")[0].strip() or said
            raise BadInput(f"the nodes cannot make the runtime_env: {why}") from error
        raise BadInput(f"Ray could not be reached: {said}; `ray status` shows the cluster's state") from error
