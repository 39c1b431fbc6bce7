"""Control messages between processes (no tensors): a star of TCP connections around worker 0."""

from quorate.data_parallel.control.hub import Hub
from quorate.data_parallel.control.link import Link

__all__ = ["Hub", "Link"]
