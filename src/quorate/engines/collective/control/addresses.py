"""Where worker 0 listens, and how the others find and reach it."""

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

#: Where worker 0's process is told by which address the others can reach it.
ADDRESS_VARIABLE = "QUORATE_ADDRESS"

_KEY = "quorate/control"
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 5.0  # per address


@dataclass(frozen=True)
class Meeting:
    """What a process must know to connect to worker 0."""

    addresses: list[str]  # by which other hosts may reach it, the best first
    port: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    network: str = field(default_factory=lambda: this_network())
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def publish(self, store: Store) -> None:
        store.set(_KEY, json.dumps(asdict(self)))


def read_meeting(store: Store, wait_s: float) -> Meeting:
    """What worker 0 has published."""
    try:
        store.wait([_KEY], timedelta(seconds=wait_s))
        return Meeting(**json.loads(store.get(_KEY)))
    except RuntimeError as error:
        raise ProcessLost(
            f"worker 0 has not said within {wait_s:g} s where it can be reached; either it died, or it never "
            f"wrapped its model as the other processes did"
        ) from error


def listen() -> tuple[socket.socket, list[str]]:
    """A socket that listens where the other processes can reach it, and the addresses to publish."""
    named = os.environ.get(ADDRESS_VARIABLE)
    if named is not None:
        with_address = _resolved(named)
        if not with_address:
            raise BadInput(
                f"{ADDRESS_VARIABLE} is {named!r}, which is no address or name that is known here; give the address "
                f"by which other hosts reach worker 0's host"
            )
        return _server(any(address.startswith("127.") for address in with_address)), [named]
    if world_is_on_one_host():
        return _server(only_here=True), [_LOOPBACK]
    return _server(only_here=False), _outer_addresses()


def _server(only_here: bool) -> socket.socket:
    if only_here:
        return socket.create_server((_LOOPBACK, 0), backlog=1024)
    with suppress(OSError):  # no IPv6 here
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def world_is_on_one_host() -> bool:
    """Whether the launcher says that all processes are here."""
    world, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if world is not None and here is not None:
        return world == here
    master = os.environ.get("MASTER_ADDR", "")
    return master in ("localhost", "::1") or master.startswith("127.")


def _outer_addresses() -> list[str]:
    """The address of the interface that reaches MASTER_ADDR, then those that this host's name stands for."""
    found: dict[str, None] = {}
    for target in _resolved(os.environ.get("MASTER_ADDR", "")):
        with suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing, but chooses the interface
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


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def this_network() -> str:
    """What two processes have in common if and only if they share a loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # no Linux
        return socket.gethostname()


def connect(meeting: Meeting, worker: int) -> socket.socket:
    """A connection to worker 0, by the first of its addresses that answers."""
    addresses = list(meeting.addresses)
    if meeting.network == this_network():
        addresses.insert(0, _LOOPBACK)
    else:
        addresses = [address for address in addresses if not address.startswith("127.")]
    failures: list[str] = []
    for address in dict.fromkeys(addresses):
        try:
            return socket.create_connection((address, meeting.port), timeout=_CONNECT_S)
        except OSError as error:
            failures.append(f"{address} port {meeting.port}: {error.strerror or error}")
    tried = "; ".join(failures) or "it listens on loopback only"
    raise ProcessLost(
        f"worker {worker} on {socket.gethostname()} cannot reach worker 0 on {meeting.host} ({tried}); set "
        f"{ADDRESS_VARIABLE} there to an address by which other hosts reach it"
    )
