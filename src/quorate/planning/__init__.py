"""Which policy to use, and how many backups to take: seconds per update, updates to the target, a recommendation."""

from __future__ import annotations

from quorate.planning.plan import Plan, Split, plan
from quorate.planning.recommending import Recommendation

__all__ = ["Plan", "Recommendation", "Split", "plan"]
