"""The address where worker 0 listens, and how the other processes find and reach it."""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from quorate.errors import BadInput, ProcessLost

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


#: Environment variable of worker 0's process: the address by which the other processes reach it.
ADDRESS_VARIABLE = "QUORATE_ADDRESS"

_KEY = "quorate/control"
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0  # per address


@dataclass(frozen=True)
class HubAddress:
    """The data that a process needs to connect to worker 0."""

    addresses: list[str]  # that other hosts can try, the best first
    port: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    network: str = field(default_factory=lambda: this_network())
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def publish(self, store: Store) -> None:
        store.set(_KEY, json.dumps(asdict(self)))


def read_hub_address(store: Store, wait_s: float) -> HubAddress:
    try:
        store.wait([_KEY], timedelta(seconds=wait_s))
        return HubAddress(**json.loads(store.get(_KEY)))
    except RuntimeError as error:
        raise ProcessLost(
            f"worker 0 has not said within {wait_s:g} s where it can be reached; either it died, or it never "
            f"wrapped its model as the other processes did"
        ) from error


def listen() -> tuple[socket.socket, list[str]]:
    """A listening socket that the other processes can reach, and the addresses to publish."""
    named = os.environ.get(ADDRESS_VARIABLE)
    if named is not None:
        resolved = _resolved(named)
        if not resolved:
            raise BadInput(
                f"{ADDRESS_VARIABLE} is {named!r}, which is no address or name that is known here; give the address "
                f"by which other hosts reach worker 0's host"
            )
        return _server(any(address.startswith("127.") for address in resolved)), [named]
    if world_is_on_one_host():
        return _server(only_here=True), [_LOOPBACK]
    return _server(only_here=False), _outer_addresses()


def _server(only_here: bool) -> socket.socket:
    if only_here:
        return socket.create_server((_LOOPBACK, 0), backlog=1024)
    with suppress(OSError):  # no IPv6
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def world_is_on_one_host() -> bool:
    """Whether the launcher's variables say that all processes run on this host."""
    world, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if world is not None and here is not None:
        return world == here
    master = os.environ.get("MASTER_ADDR", "")
    return master in ("localhost", "::1") or master.startswith("127.")


def _outer_addresses() -> list[str]:
    """The address of the interface that reaches MASTER_ADDR, then the addresses of this host's name."""
    found: dict[str, None] = {}
    for target in _resolved(os.environ.get("MASTER_ADDR", "")):
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends no packet, but selects the interface
            found[probe.getsockname()[0]] = None
    for address in _resolved(socket.gethostname()):
        found[address] = None
    outer = [address for address in found if not address.startswith("127.") and address != "::1"]
    return outer or [_LOOPBACK]


def _resolved(name: str) -> list[str]:
    if not name:
        return []
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def this_network() -> str:
    """An identifier that two processes share exactly if they share a loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()


def connect(hub: HubAddress, worker: int) -> socket.socket:
    """A connection to worker 0 over the first of its addresses that answers."""
    addresses = list(hub.addresses)
    if hub.network == this_network():
        addresses.insert(0, _LOOPBACK)
    else:
        addresses = [address for address in addresses if not address.startswith("127.")]
    failures: list[str] = []
    for address in dict.fromkeys(addresses):
        try:
            return socket.create_connection((address, hub.port), timeout=_CONNECT_S)
        except OSError as error:
            failures.append(f"{address} port {hub.port}: {error.strerror or error}")
    tried = "; ".join(failures) or "it listens on loopback only"
    raise ProcessLost(
        f"worker {worker} on {socket.gethostname()} cannot reach worker 0 on {hub.host} ({tried}); set "
        f"{ADDRESS_VARIABLE} there to an address by which other hosts reach it"
    )
