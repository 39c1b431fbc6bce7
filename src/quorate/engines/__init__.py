"""Where tickets run. All engines keep one contract (`quorate.engines.base`)."""

from __future__ import annotations

from quorate.engines.base import Engine, Job, Outcome
from quorate.engines.local.engine import Local
from quorate.engines.ray import Ray
from quorate.engines.simulated.engine import Simulated

__all__ = ["Engine", "Job", "Local", "Outcome", "Ray", "Simulated"]
