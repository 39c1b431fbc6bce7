"""What processes say to each other besides tensors: a star of TCP connections around worker 0."""

from __future__ import annotations

from quorate.engines.collective.control.hub import Hub
from quorate.engines.collective.control.link import Link

__all__ = ["Hub", "Link"]
