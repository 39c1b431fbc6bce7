"""The local engine: real processes on one machine. See docs/engines.md for how it works."""

from __future__ import annotations

from quorate.engines.local.engine import Local

__all__ = ["Local"]
