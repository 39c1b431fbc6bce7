"""Finding a Ray cluster by its address, with a time limit and a sentence for everything that can be wrong there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.engines.ray.security import is_here, is_loopback
from quorate.errors import BadInput

ANSWER_WITHIN_S = 10.0
SAY_WITHIN_S = 20.0  # a process has to start and to import Ray for the question
_PROBE = Path(__file__).with_name("probing.py")


@dataclass(frozen=True)
class Found:
    """A cluster that answered."""

    address: str
    takes_anyone: bool  # it asks for no token
    nodes: tuple[str, ...]  # their addresses
    dashboard: str
    on_loopback: bool


def reach(address: str) -> Found:
    """The cluster at `host:port` or `auto`, asked who it is; BadInput says what is wrong."""
    place = _resolved(address)
    host, port = _host_and_port(place)
    _check_answer(host, port, place)
    said = _probe(place)
    _check_versions(place, said["ray"], said["python"])
    nodes = said["nodes"]
    if not any(is_here(node["address"]) and os.path.exists(node["socket"]) for node in nodes):  # noqa: PTH110
        raise BadInput(
            f"this machine is not a node of the Ray cluster at {place} (its nodes: {_some(nodes)}), and only a node "
            f"can hold a run: start the run on one of them, submit it with `ray job submit`, or make this machine a "
            f"node with `ray start --address={place}`"
        )
    heads = [node["address"] for node in nodes if node["is_head"]]
    return Found(
        address=place,
        takes_anyone=said["takes_anyone"],
        nodes=tuple(node["address"] for node in nodes),
        dashboard=said["dashboard"],
        on_loopback=bool(heads) and is_loopback(heads[0]),
    )


def _resolved(address: str) -> str:
    """`auto` becomes the address of the cluster on this machine."""
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


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"address is {address!r}, but it must be host:port (port 6379 as a rule) or auto")
    return host.strip("[]"), int(port)


def _check_answer(host: str, port: int, address: str) -> None:
    """Somebody listens there. Ray itself would wait for minutes."""
    try:
        with socket.create_connection((host, port), timeout=ANSWER_WITHIN_S):
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
    """What the cluster says of itself."""
    try:
        done = subprocess.run(
            [sys.executable, str(_PROBE), address],
            capture_output=True,
            text=True,
            timeout=SAY_WITHIN_S,
            check=False,
        )
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        raise BadInput(
            f"something answers at {address}, but not as Ray does, within {SAY_WITHIN_S:g} s; give the address "
            f"of the cluster's head as `ray start --head` prints it (port 6379 as a rule, not the dashboard's 8265), "
            f"and set RAY_USE_TLS and its certificates here if it has them"
        ) from None
    if said.get("error") == "AuthenticationError":
        raise BadInput(
            f"the Ray cluster at {address} asks for a token, and this process has none or another; set "
            f"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or put the token into ~/.ray/auth_token)"
        )
    if "error" in said:
        raise BadInput(f"the Ray cluster at {address} does not say who it is: {said['error']}: {said['text']}")
    return said


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


def _some(nodes: list[dict[str, Any]]) -> str:
    names = [str(node["address"]) for node in nodes]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "none"
