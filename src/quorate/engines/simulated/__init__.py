"""The simulated engine: a cluster that exists only in virtual time."""

from __future__ import annotations

from quorate.engines.simulated.engine import Simulated

__all__ = ["Simulated"]
