"""From costs to answers: what b costs, and what more machines buy."""

from __future__ import annotations

from typing import NamedTuple

from experiments.common.spread import Spread, spread_of
from experiments.communication.study import Cost, Split

Found = dict[Split, list[Cost]]
#: Updates to a target fall as N^-0.85 (Chen et al. 2016, figure 5): what a larger quorum is worth.
POWER = 0.85


class Bought(NamedTuple):
    """What more machines give: machines over before, and how much sooner a target is reached."""

    machines: float
    as_backups: Spread
    as_workers: Spread


def quorum_of(found: Found) -> int:
    """The quorum that stays while backups are added: the smallest there is."""
    return min(trial.quorum for trial in found)


def by_backups(found: Found, world: str, layout: str, late: str, quorum: int) -> dict[int, list[Cost]]:
    """Costs of every seed by number of backups."""
    costs: dict[int, list[tuple[int, Cost]]] = {}
    for trial, rows in found.items():
        if (trial.world, trial.layout, trial.late, trial.quorum) == (world, layout, late, quorum):
            costs.setdefault(trial.backups, []).append((trial.seed, rows[0]))
    return {backups: [cost for _, cost in sorted(seeds)] for backups, seeds in sorted(costs.items())}


def bought(found: Found, world: str, layout: str, more: int) -> Bought | None:
    """So many more machines, as backups or as workers of a larger quorum; seed by seed over none."""
    quorum = quorum_of(found)
    fixed = by_backups(found, world, layout, "cancel", quorum)
    larger = by_backups(found, world, layout, "cancel", quorum + more).get(0)
    if 0 not in fixed or more not in fixed or larger is None:
        return None
    updates = ((quorum + more) / quorum) ** POWER
    return Bought(
        (quorum + more) / quorum,
        spread_of([before.seconds / after.seconds for before, after in zip(fixed[0], fixed[more], strict=True)]),
        spread_of([updates * before.seconds / after.seconds for before, after in zip(fixed[0], larger, strict=True)]),
    )
