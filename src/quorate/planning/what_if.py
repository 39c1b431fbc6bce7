"""`machines=200`, `without=3`, `bandwidth=1Gbps`: one thing changed, and the plan made again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quorate.errors import BadInput
from quorate.network import Network, parse_network

_FORMS = (
    '"machines=200", "without=3" (several: without=3+5) or "bandwidth=1Gbps" (also server=10Gbps, shards=8, '
    "latency=0.5ms)"
)
_LINKS = ("bandwidth", "server", "shards", "latency")


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What is changed."""

    text: str
    machines: int | None = None
    without: tuple[int, ...] = ()
    network: Network | None = None


def parse_what_if(text: str) -> WhatIf:
    """Several changes at once are joined by commas."""
    machines: int | None = None
    without: tuple[int, ...] = ()
    links: list[str] = []
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in ("machines", "without", *_LINKS):
            raise BadInput(f"what-if {text!r}: {part.strip()!r} is not understood; write e.g. {_FORMS}")
        if name in _LINKS:
            links.append(f"{name}={value}")
        elif re.fullmatch(r"\d+(\+\d+)*", value) is None or (name == "machines" and "+" in value):
            raise BadInput(f"what-if {text!r}: {value!r} is no number from 0 up; write e.g. {_FORMS}")
        elif name == "machines":
            machines = int(value)
            if machines < 1:
                raise BadInput(f"what-if {text!r}: machines is {machines}, but there must be at least 1")
        else:
            without = tuple(int(number) for number in value.split("+"))
    return WhatIf(
        text=text.strip(), machines=machines, without=without, network=parse_network(",".join(links)) if links else None
    )
