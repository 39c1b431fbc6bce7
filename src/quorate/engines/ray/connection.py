"""Connects a run to a Ray cluster: at an address, the one the script has joined already, or one started here."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.engines.ray import security
from quorate.engines.ray.cluster import INSTALL, Cluster, Demand
from quorate.engines.ray.security import is_here, is_loopback
from quorate.engines.ray.session import (
    Session,
    end_connection,
    first_line,
    loopback_only,
    prints_to_stderr,
    restore_variables,
    untouched_signals,
)
from quorate.errors import BadInput

ANSWER_WITHIN_S = 10.0
SAY_WITHIN_S = 20.0  # time for the process of `_probe` to start, import Ray and ask


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


# ---------------------------------------------------------------- the runtime environment


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


# ---------------------------------------------------------------- a cluster at an address


@dataclass(frozen=True)
class FoundCluster:
    """A cluster that answered."""

    address: str
    takes_anyone: bool  # whether it requires no token
    nodes: tuple[str, ...]  # addresses
    dashboard: str
    on_loopback: bool


def reach(address: str) -> FoundCluster:
    """Find the cluster at `host:port` or `auto`; BadInput if this process cannot run on it."""
    address = _resolved(address)
    _check_answer(address)
    reply = _probe(address)
    _check_versions(address, reply["ray"], reply["python"])
    nodes = reply["nodes"]
    # os.path, because Path.exists raises PermissionError for a socket of another user.
    if not any(is_here(node["address"]) and os.path.exists(node["socket"]) for node in nodes):  # noqa: PTH110
        names = [str(node["address"]) for node in nodes]
        some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "none"
        raise BadInput(
            f"this machine is not a node of the Ray cluster at {address} (its nodes: {some}), and only a node "
            f"can hold a run: start the run on one of them, submit it with `ray job submit`, or make this machine a "
            f"node with `ray start --address={address}`"
        )
    heads = [node["address"] for node in nodes if node["is_head"]]
    return FoundCluster(
        address=address,
        takes_anyone=reply["takes_anyone"],
        nodes=tuple(node["address"] for node in nodes),
        dashboard=reply["dashboard"],
        on_loopback=bool(heads) and is_loopback(heads[0]),
    )


def _resolved(address: str) -> str:
    """Replace `auto` by the address of the cluster on this machine, and refuse URLs."""
    address = address.strip()
    scheme, separator, _ = address.partition("://")
    if separator and scheme == "ray":
        raise BadInput(
            f"address is {address!r}, Ray's client protocol, through which workers cannot share memory with the run; "
            f"submit the run with `ray job submit`, or start it on a node of the cluster with host:port (6379) or auto"
        )
    if separator:
        raise BadInput(
            f"address is {address!r}, which looks like the Ray dashboard's; give the cluster's own as host:port "
            f"(port 6379 as a rule), or `auto` on one of its nodes"
        )
    if address != "auto":
        return address
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        found = None
    if not found:
        raise BadInput(
            "address is 'auto', but no Ray runs on this machine; start one with `ray start --head`, give host:port, "
            "or leave the address away and one is started for the run"
        )
    return str(found)


def _check_answer(address: str) -> None:
    """Check that a process listens at the address. Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"address is {address!r}, but it must be host:port (port 6379 as a rule) or auto")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN_S):
            pass
    except socket.gaierror:
        raise BadInput(f"address is {address!r}, but no machine named {host!r} is known here") from None
    except TimeoutError:
        raise BadInput(
            f"nothing answered at {address} within {ANSWER_WITHIN_S:g} s; check the address, that Ray runs there "
            f"(`ray status`) and that the network lets this machine through"
        ) from None
    except OSError as error:
        raise BadInput(
            f"nothing answers at {address} ({error.strerror or error}); check the address, and that Ray runs there "
            f"(`ray status`)"
        ) from None


def _probe(address: str) -> dict[str, Any]:
    """Versions and nodes of the cluster.

    A separate process asks, because Ray's client waits 40 s for a server that is not Ray and cannot be interrupted; a
    process can be killed. It gets only the source of one function: importing quorate would take seconds.
    """
    source = f"from __future__ import annotations\n{inspect.getsource(_print_description)}"
    try:
        command = [sys.executable, "-P", "-c", f"{source}\n_print_description({address!r})"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SAY_WITHIN_S, check=False)
        reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        raise BadInput(
            f"something answers at {address}, but not as Ray does, within {SAY_WITHIN_S:g} s; give the address "
            f"of the cluster's head as `ray start --head` prints it (port 6379 as a rule, not the dashboard's 8265), "
            f"and set RAY_USE_TLS and its certificates here if it has them"
        ) from None
    if reply.get("error") == "AuthenticationError":
        raise BadInput(
            f"the Ray cluster at {address} asks for a token, and this process has none or another; set "
            f"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or put the token into ~/.ray/auth_token)"
        )
    if "error" in reply:
        raise BadInput(f"the Ray cluster at {address} did not describe itself: {reply['error']}: {reply['text']}")
    return reply


def _print_description(address: str) -> None:
    """Print versions and nodes of a cluster as one line of JSON. Runs in a process of its own; see `_probe`.

    The first request has no token, which shows whether the cluster requires one.
    """
    import json
    import os
    import sys

    timeout_s = 5.0  # for each request
    try:
        from ray._raylet import Config, GcsClient

        mode = os.environ.get("RAY_AUTH_MODE")
        os.environ["RAY_AUTH_MODE"] = "disabled"
        Config.initialize("")
        takes_anyone = True
        try:
            client = GcsClient(address=address)
        except Exception as error:
            if type(error).__name__ != "AuthenticationError":
                raise
            takes_anyone = False
            del os.environ["RAY_AUTH_MODE"]
            if mode is not None:
                os.environ["RAY_AUTH_MODE"] = mode
            Config.initialize("")
            client = GcsClient(address=address)
        versions = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=timeout_s))
        dashboard = client.internal_kv_get(b"dashboard", namespace=b"dashboard", timeout=timeout_s)
        found = {
            "takes_anyone": takes_anyone,
            "ray": versions["ray_version"],
            "python": versions["python_version"],
            "dashboard": dashboard.decode() if dashboard else "",
            "nodes": [
                {
                    "address": info.node_manager_address,
                    "socket": info.raylet_socket_name,
                    "is_head": bool(info.is_head_node),
                }
                for info in client.get_all_node_info(timeout=timeout_s).values()
                if info.state == 0  # alive
            ],
        }
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait for Ray's threads, which may still wait for a reply


def _check_versions(address: str, ray_there: str, python_there: str) -> None:
    import ray

    python_here = ".".join(str(part) for part in sys.version_info[:3])
    parts = 2 if os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor" else 3  # as Ray itself compares
    same_python = python_there.split(".")[:parts] == python_here.split(".")[:parts]
    if ray_there == ray.__version__ and same_python:
        return
    raise BadInput(
        f"the Ray cluster at {address} runs Ray {ray_there} with Python {python_there}, and here are Ray "
        f"{ray.__version__} and Python {python_here}, but both must be the same; run with the cluster's own "
        f"environment, or install its versions here (pip install ray=={ray_there})"
    )
