"""Who can reach a Ray cluster. Ray executes code for whoever reaches it, so its address and its token matter."""

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

_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_LISTENING = "0A"  # a state in /proc/net/tcp


# ---------------------------------------------------------------- a token for a cluster of our own


@contextmanager
def fresh_token() -> Iterator[None]:
    """Inside, Ray processes that are started ask for a token nobody else knows; afterwards only they and Ray's
    client in this process have it. It is never printed and never on disk. `forget_token` takes it from the client.
    """
    before = {name: os.environ.get(name) for name in (_MODE, _TOKEN, _TOKEN_FILE)}
    os.environ.pop(_TOKEN_FILE, None)
    os.environ.update({_MODE: "token", _TOKEN: secrets.token_hex(32)})
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forget_token() -> None:
    """Ray's client in this process goes back to what the environment says; for after the shutdown."""
    _read_again()


def _read_again() -> None:
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")  # first: a thread that still ends would look for a token of the old mode
    AuthenticationTokenLoader.instance().reset_cache()


# ---------------------------------------------------------------- addresses


def is_loopback(host: str) -> bool:
    return all(address.is_loopback for address in _addresses(host)) and bool(_addresses(host))


def public_addresses(hosts: Iterable[str]) -> list[str]:
    """Those that the whole internet can route to: not loopback, private, link-local or a carrier's own."""
    return [host for host in dict.fromkeys(hosts) if any(address.is_global for address in _addresses(host))]


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """A host's addresses; none where its name is unknown."""
    found = []
    with suppress(OSError, UnicodeError):
        for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            address = ipaddress.ip_address(str(place[0]).partition("%")[0])
            mapped = getattr(address, "ipv4_mapped", None)
            found.append(mapped or address)
    return found


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
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
    """What listens on this machine, from /proc; empty where there is none."""
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
    """An address as the kernel writes it: words of 32 bits, each in the machine's own order."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(data)
    return str(getattr(address, "ipv4_mapped", None) or address)


def own_public_addresses() -> list[str]:
    """The public addresses of this machine that its name or its route to the outside shows."""
    found = [socket.gethostname()]
    for family, target in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect((target, 9))  # sends nothing: it only asks which own address would be used
            found.append(str(trial.getsockname()[0]))
    return public_addresses(found)


# ---------------------------------------------------------------- the warning


def warn_if_open(places: dict[str, str], takes_anyone: bool) -> None:
    """One warning when a cluster that asks for no token can be reached by anybody.

    `places`: host -> what is there, for the sentence.
    """
    if not takes_anyone:
        return
    for host in public_addresses(places):
        warnings.warn(
            f"{places[host]} is at {host}, a public address, and asks for no token: Ray executes code for whoever "
            f"reaches it; close its ports to the outside, or start Ray with RAY_AUTH_MODE=token (see docs/ray.md)",
            RuntimeWarning,
            stacklevel=2,
        )
        return


def reachable_places(address: str, nodes: Iterable[str], dashboard: str) -> dict[str, str]:
    """Where a cluster can be reached, as far as this machine can see."""
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
