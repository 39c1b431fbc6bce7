"""The planner: from measured or assumed step times to a recommended split of the machines into quorum and backups."""

from __future__ import annotations

from quorate.planning.plan import Plan, Split, plan
from quorate.planning.recommendation import Recommendation

__all__ = ["Plan", "Recommendation", "Split", "plan"]
