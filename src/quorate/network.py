"""Communication times of a simulated cluster: bytes over a bandwidth plus a latency, per worker and at the servers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quorate.errors import BadInput, check_at_least

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_FORM = "bandwidth=1Gbps,latency=0.5ms,server=10Gbps,shards=8"


@dataclass(frozen=True, kw_only=True)
class Network:
    """A star: every worker has its own link, and all workers share the links of the servers, one per shard.

    Parameters go out and gradients come in. A transfer takes `latency_s` plus the time of the slower of the
    two links; a server's link serves one transfer after the other in each direction. inf: no limit.

    Shards are of equal size, each on its own machine, and a worker asks all of them at the same moment. So their
    links always have the same queue. One link is simulated for all of them: it carries 1/shards of the bytes.
    """

    bandwidth: float = math.inf  # bytes per second of a worker's link, each direction
    server_bandwidth: float = math.inf  # bytes per second of each server's link, each direction
    latency_s: float = 0.0
    shards: int = 1  # servers that share the model

    def __post_init__(self) -> None:
        for name, rate in ("bandwidth", self.bandwidth), ("server_bandwidth", self.server_bandwidth):
            if not rate > 0:
                raise BadInput(f"network: {name} is {rate}, but it must be more than 0 bytes/s")
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise BadInput(f"network: latency is {self.latency_s} s, but it must be a finite time that is not negative")
        check_at_least("network: shards", self.shards, 1)
        if self.shards > 1 and math.isinf(self.server_bandwidth):
            raise BadInput(
                f"network: shards is {self.shards}, which changes nothing while servers' links have no limit; "
                f"give their rate too, e.g. server=10Gbps"
            )

    def worker_s(self, size_bytes: float) -> float:
        """How long a worker's link is busy with a version or a gradient."""
        return size_bytes / self.bandwidth

    def server_s(self, size_bytes: float) -> float:
        """How long each server's link is busy with its piece of a version or a gradient."""
        return size_bytes / self.shards / self.server_bandwidth

    def text(self) -> str:
        """The inverse of `parse_network`."""
        return (
            f"bandwidth={_rate_text(self.bandwidth)},latency={self.latency_s * 1e3:.12g}ms,"
            f"server={_rate_text(self.server_bandwidth)}" + (f",shards={self.shards}" if self.shards > 1 else "")
        )


def parse_network(text: str) -> Network:
    """The network of a text: `bandwidth=1Gbit,latency=0.5ms,server=10GbE,shards=8`; b is a bit, B a byte.

    Each part is optional.
    """
    found: dict[str, Any] = {}
    names = {"bandwidth": "bandwidth", "server": "server_bandwidth", "latency": "latency_s", "shards": "shards"}
    readers: dict[str, Callable[[str, str], float]] = {"latency": _seconds, "shards": _count}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in names:
            raise BadInput(f"network {text!r}: {part.strip()!r} is not understood; write e.g. {_FORM}")
        found[names[name]] = readers.get(name, _rate)(text, value)
    return Network(**found)


def _rate(text: str, value: str) -> float:
    if value.strip() == "inf":
        return math.inf
    match = re.fullmatch(
        rf"({_NUMBER}|inf)\s*((?i:[KMGT]i?)?)((?i:bps|bits?(?:/s)?|igE|bE)|b(?:/s)?|B(?:/s|ps))", value.strip()
    )
    if match is None:
        raise BadInput(f"network {text!r}: {value!r} is not a rate; write e.g. 1Gbit, 10GbE, 250Mbps or 125MB/s")
    in_bytes = match[3] in ("B/s", "Bps")
    return float(match[1]) * _UNITS[match[2].upper()] / (1 if in_bytes else 8)


def _seconds(text: str, value: str) -> float:
    match = re.fullmatch(rf"(-?{_NUMBER})\s*(us|ms|s)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise BadInput(f"network {text!r}: {value!r} is not a time; write e.g. 0.5ms or 0.0005s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[(match[2] or "s").lower()]


def _count(text: str, value: str) -> int:
    if re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII) is None:
        raise BadInput(f"network {text!r}: {value!r} is not a number of shards; write e.g. shards=8")
    return int(value)


def _rate_text(rate: float) -> str:
    return f"{rate:.12g}B/s"
