"""A Ray cluster that was joined or started: its nodes, their resources, and which nodes are about to leave."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quorate.engines.ray import security
from quorate.engines.ray.connection import (
    Session,
    end_connection,
    first_line,
    loopback_only,
    prints_to_stderr,
    reach,
    restore_variables,
    untouched_signals,
)
from quorate.errors import BadInput, ClusterLost, install_line

_ANSWER_S = 2.0
INSTALL = install_line("ray")


def checked_environment(runtime_env: dict[str, Any] | None, working_dir: str | None) -> dict[str, Any]:
    """Ray's runtime_env including the working folder; BadInput for mistakes that Ray would only find later."""
    if runtime_env is not None and not isinstance(runtime_env, dict):
        raise BadInput(f"runtime_env is a {type(runtime_env).__name__}, but it must be a dict as Ray takes it")
    environment = dict(runtime_env or {})
    if working_dir is not None:
        if environment.get("working_dir") not in (None, working_dir):
            raise BadInput("both working_dir and runtime_env['working_dir'] are given; give one of them")
        environment["working_dir"] = working_dir
    if environment.get("working_dir") is not None:
        _check_working_dir(str(environment["working_dir"]))
    from ray.runtime_env import RuntimeEnv

    try:
        RuntimeEnv(**environment)
    except (TypeError, ValueError) as error:
        raise BadInput(f"runtime_env is not one that Ray takes: {error}") from error
    return environment


def _check_working_dir(folder: str) -> None:
    path = Path(folder)
    if "://" in folder or (path.suffix == ".zip" and path.is_file()):  # a URL is an archive that every node can load
        return
    if not path.exists():
        raise BadInput(f"working_dir is {folder!r}, but there is no such folder; give the one with the task's files")
    if not path.is_dir():
        raise BadInput(f"working_dir is {folder!r}, which is a file; give the folder that holds it")


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

    @property
    def started_here(self) -> bool:
        """Whether this process started the cluster; `close` then stops it."""
        return self._session is not None

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
                    with socket.create_connection(port, timeout=_ANSWER_S):
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


# ---------------------------------------------------------------- connecting


def connect(
    *,
    address: str | None,
    workers: int,
    demand: Demand,
    runtime_env: dict[str, Any] | None = None,
    working_dir: str | None = None,
    extra: Mapping[str, float] | None = None,
) -> Cluster:
    """The cluster at an address, the one this process is connected to, or one started here for this run.

    extra: resources of a cluster started here in addition to the workers' demand, by Ray's names (for shards).
    """
    variables = dict(os.environ)
    ray = ray_module()
    environment = checked_environment(runtime_env, working_dir)
    if ray.is_initialized():
        return _already_connected(address, environment)
    settings: dict[str, Any] = {
        "runtime_env": environment or None,
        "configure_logging": False,
        "logging_level": logging.ERROR,
        "log_to_driver": True,
    }
    from_environment = address is None
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or "local"  # the variable is also set inside a Ray job
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address == "local":
            cluster = _started(workers, demand, extra or {}, settings)
        else:
            cluster = _connected(address, settings)
    except BaseException as error:
        restore_variables(variables)
        if from_environment and address != "local" and isinstance(error, BadInput):
            raise BadInput(f"{error} (this address is from RAY_ADDRESS)") from error
        raise
    cluster.variables_before = variables
    return cluster


def ray_module() -> Any:
    """Import Ray; BadInput with the install line if it is missing."""
    try:
        import ray
    except ImportError as error:
        if error.name != "ray":
            raise BadInput(f"Ray cannot be imported: {error}; install it again with: {INSTALL}") from error
        raise BadInput(f"the Ray engine needs Ray, which is not installed: {INSTALL}") from None
    return ray


def _already_connected(address: str | None, environment: dict[str, Any]) -> Cluster:
    """Use the connection that the user's script made with ray.init."""
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


def _started(workers: int, demand: Demand, extra: Mapping[str, float], settings: dict[str, Any]) -> Cluster:
    """Start Ray on this machine with room for the run. It may have more CPUs than cores, as in the local engine."""
    session = Session()
    names = demand.resources.keys() | (extra.keys() - {"CPU", "GPU"})
    resources = {name: demand.resources.get(name, 0.0) * workers + extra.get(name, 0.0) for name in names}
    cpus = demand.cpus * workers + extra.get("CPU", 0.0)
    try:
        with _explained_errors():
            session.start(cpus=cpus, resources=resources, **settings)
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
        with _explained_errors(), loopback_only(found.on_loopback), untouched_signals():
            ray.init(address=found.address, **settings)
        prints_to_stderr()
        return Cluster(None, connected_here=True)
    except BaseException:
        end_connection()
        raise


@contextmanager
def _explained_errors() -> Iterator[None]:
    """Turn errors of ray.init into BadInput with a remedy."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
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
