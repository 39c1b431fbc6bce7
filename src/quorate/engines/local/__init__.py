"""The local engine: worker processes on one machine. docs/engines.md describes how it works."""

from __future__ import annotations

from quorate.engines.local.engine import Local

__all__ = ["Local"]
