"""Who can reach a Ray cluster: tokens, addresses and a warning. Ray executes code for everybody who can reach it."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"  # a state in /proc/net/tcp


# ---------------------------------------------------------------- the token of a cluster started here


@contextmanager
def changed_environment(**variables: str | None) -> Iterator[None]:
    """Inside, these environment variables have these values (None: unset); afterwards they are restored."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def fresh_token() -> Iterator[None]:
    """Inside, Ray processes start with a new secret token.

    Afterwards only these processes and Ray's client in this process know the token. It is never printed and never
    written to disk. `forget_token` removes it from the client.
    """
    token = secrets.token_hex(32)
    with changed_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_AUTH_TOKEN_PATH=None):
        forget_token()  # the client reads the new token
        yield


def forget_token() -> None:
    """Make Ray's client in this process read mode and token from the environment again; call it after a shutdown."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")  # first: a thread that is still ending would look for a token of the old mode
    AuthenticationTokenLoader.instance().reset_cache()


# ---------------------------------------------------------------- addresses


def is_loopback(host: str) -> bool:
    addresses = _addresses(host)
    return bool(addresses) and all(address.is_loopback for address in addresses)


def public_addresses(hosts: Iterable[str]) -> list[str]:
    """The hosts that are routable from the internet: not loopback, private, link-local or carrier-grade NAT."""
    return [host for host in dict.fromkeys(hosts) if any(address.is_global for address in _addresses(host))]


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The IP addresses of a host; empty for an unknown name."""
    found = []
    with suppress(OSError, UnicodeError):
        for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            address = ipaddress.ip_address(str(place[0]).partition("%")[0])
            found.append(getattr(address, "ipv4_mapped", None) or address)
    return found


def is_here(host: str) -> bool:
    """Whether an address belongs to this machine: only such addresses can be bound."""
    for address in _addresses(host):
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((str(address), 0))
            return True
    return False


class Listener(NamedTuple):
    host: str
    port: int


def listeners() -> list[Listener]:
    """The listening TCP sockets of this machine, from /proc; empty on systems without it."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, place, _, state = line.split()[:4]
                if state == _LISTENING:
                    host, port = place.split(":")
                    found.append(Listener(_proc_address(host), int(port, 16)))
    return found


def _proc_address(text: str) -> str:
    """Parse an address of /proc/net: 32-bit words, each in the machine's byte order."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(data)
    return str(getattr(address, "ipv4_mapped", None) or address)


def own_public_addresses() -> list[str]:
    """The public addresses of this machine that its host name or its outgoing route shows."""
    found = [socket.gethostname()]
    for family, target in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect((target, 9))  # sends nothing: it only selects the source address
            found.append(str(trial.getsockname()[0]))
    return public_addresses(found)


# ---------------------------------------------------------------- the warning


def warn_if_open(places: dict[str, str], takes_anyone: bool) -> None:
    """Warn once if a cluster without a token has a public address.

    places: host -> the name of the thing at this host, for the warning.
    """
    public = public_addresses(places) if takes_anyone else []
    if public:
        warnings.warn(
            f"{places[public[0]]} is at {public[0]}, a public address, and asks for no token: Ray executes code for "
            f"whoever reaches it; close its ports to the outside, or start Ray with RAY_AUTH_MODE=token "
            f"(see docs/ray.md)",
            RuntimeWarning,
            stacklevel=2,
        )


def reachable_places(address: str, nodes: Iterable[str], dashboard: str) -> dict[str, str]:
    """The hosts at which this machine can see the cluster: host -> the name of the thing at this host."""
    host, _, port = address.rpartition(":")
    places = {host.strip("[]"): "the Ray cluster"}
    places |= {node: "a node of the Ray cluster" for node in nodes if node not in places}
    dashboard_host = dashboard.rpartition(":")[0].strip("[]")
    if dashboard_host:
        places.setdefault(dashboard_host, "the Ray dashboard")
    if any(one.port == int(port) and one.host in ("0.0.0.0", "::") for one in listeners()) and is_here(host):
        for own in own_public_addresses():
            places.setdefault(own, "the Ray cluster on this machine, which listens on every address,")
    return places
