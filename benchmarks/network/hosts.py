"""Hosts for the benchmark: network namespaces on one switch, each behind a link with a rate limit.

A host is a namespace with one end of a veth pair; the other end is a port of a bridge in a namespace of its own, so
that nothing of the machine's own network is touched. The limit is a token bucket (`tc … tbf`) on both ends of the pair:
the host's end limits what it sends, the switch's end what it receives, as a full-duplex link does. Without the second,
three hosts could send to one at three times its rate. Sockets see the bucket on their own host, so the kernel keeps
what waits in it small (TCP small queues), as before a real network card.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

INTERFACE = "net0"  # of every host, in its namespace
_BRIDGE = "bridge0"
_BURST_BYTES = 131_072  # two of the largest packets that a veth passes on in one piece
_LONGEST_QUEUE_MS = 50
_NAME = re.compile(r"quorate-bench-(\d+)-(?:switch|host\d+)")
MOST_HOSTS = 250


class HostsError(Exception):
    """Hosts cannot be made here; the text says what is missing."""


def why_not() -> str | None:
    """One sentence that says why no hosts can be made on this machine; None if they can."""
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        return f"This benchmark needs {' and '.join(missing)} (packages iproute2 and util-linux)."
    if os.geteuid() != 0:
        return "This benchmark makes network namespaces and rate limits, which needs root: run it with sudo."
    tried = f"quorate-bench-{os.getpid()}-host0"
    made = subprocess.run(["ip", "netns", "add", tried], capture_output=True, text=True)
    if made.returncode:
        return f"This machine does not allow network namespaces, which the benchmark needs: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", tried], capture_output=True)
    return None


class Hosts:
    """Some hosts on a switch, for the length of a `with`."""

    def __init__(self, count: int) -> None:
        if not 2 <= count <= MOST_HOSTS:
            raise HostsError(f"There can be 2 to {MOST_HOSTS} hosts, not {count}.")
        self.count = count
        self.rate_bits_per_s: float | None = None
        self._prefix = f"quorate-bench-{os.getpid()}-"
        self._switch = f"{self._prefix}switch"

    def __enter__(self) -> Hosts:
        remove_stale()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def namespace(self, host: int) -> str:
        return f"{self._prefix}host{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def inside(self, host: int, command: list[str]) -> list[str]:
        """The command, as it is run on that host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def limit(self, bits_per_s: float | None) -> None:
        """Every host's link has this rate from now on, each way; None: as fast as the machine goes."""
        self.rate_bits_per_s = bits_per_s
        for host in range(self.count):
            for namespace, device in ((self.namespace(host), INTERFACE), (self._switch, f"port{host}")):
                if bits_per_s is None:
                    with contextlib.suppress(HostsError):  # there was no limit
                        _do("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
                else:
                    _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket(bits_per_s))

    def _make(self) -> None:
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "name", _BRIDGE, "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", _BRIDGE, "up")
        for host in range(self.count):
            namespace, port = self.namespace(host), f"port{host}"
            _do("ip", "netns", "add", namespace)
            pair = ["name", INTERFACE, "netns", namespace, "type", "veth", "peer", "name", port, "netns", self._switch]
            _do("ip", "link", "add", *pair)
            _do("ip", "-n", self._switch, "link", "set", port, "master", _BRIDGE, "up")
            _do("ip", "-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _do("ip", "-n", namespace, "link", "set", "lo", "up")
            _do("ip", "-n", namespace, "link", "set", INTERFACE, "up")

    def _remove(self) -> None:
        for name in namespaces():
            if name.startswith(self._prefix):
                _remove_namespace(name)


def bucket(bits_per_s: float) -> list[str]:
    """tc's words for the limit: a bucket of two large packets or a millisecond, whichever is more."""
    burst = max(_BURST_BYTES, round(bits_per_s / 8 / 1000))
    return ["tbf", "rate", f"{round(bits_per_s)}bit", "burst", str(burst), "latency", f"{_LONGEST_QUEUE_MS}ms"]


def namespaces() -> Iterator[str]:
    """The names of all that this benchmark made, whoever ran it."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        if line.strip() and _NAME.fullmatch(line.split()[0]):
            yield line.split()[0]


def remove_stale() -> list[str]:
    """Remove what a run that was killed left behind: its process number is in the names, and is no longer alive."""
    gone = [name for name in namespaces() if not _is_alive(owner(name))]
    for name in gone:
        _remove_namespace(name)
    return gone


def warn_of_others() -> None:
    """Say on stderr whose run is under way, since two at a time measure each other."""
    others = {owner(name) for name in namespaces()} - {os.getpid()}
    for process in sorted(process for process in others if _is_alive(process)):
        print(f"Process {process} runs this benchmark, too: each disturbs the other; wait for it.", file=sys.stderr)


def owner(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return int(found[1])


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_namespace(name: str) -> None:
    """The namespace with the processes in it, which are this benchmark's; the veth pair goes with it."""
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    for process in inside.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostsError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
