"""What the planner says of the runs that a report is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quorate.errors import BadInput
from quorate.reporting.report.gathering import Gathered

_MOST_WORKERS = 256  # beyond it the planner takes long, and is better asked by itself


def plan_for(runs: Sequence[Gathered]) -> tuple[dict[str, Any] | None, str | None]:
    """A plan from the run that shows most, which is one that waited for everybody; or why there is none."""
    from quorate.planning import plan

    why: str | None = None
    for run in sorted(runs, key=lambda run: run.header["policy"]["name"] != "full-sync"):
        if run.header["workers"] > _MOST_WORKERS:
            why = why or f"for {run.header['workers']} workers the planner takes a while; ask it with quorate plan RUN"
            continue
        try:
            return {**plan(run.path).as_dict(), "run": runs.index(run)}, None
        except BadInput as error:
            why = why or str(error)
    return None, why
