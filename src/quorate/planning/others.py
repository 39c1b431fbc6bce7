"""What other policies would do in the same world, by simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quorate.engines import Simulated
from quorate.planning.playing import Played
from quorate.planning.updates import Effort
from quorate.planning.world import World
from quorate.policies import Async, Deadline, KBatchSync, Policy, SoftSync
from quorate.training import train

_TICKETS = 8_000  # of each simulation: a tenth of a second or two
_FEWEST_UPDATES = 40


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One policy: what an update takes and, beside the splits, the time to the target."""

    label: str
    policy: str
    seconds_per_update: float
    gradients: float  # per update
    staleness: float  # mean, in updates
    updates: float  # relative to the split that needs fewest; what staleness costs is not in it
    time: float
    wasted: float
    bytes: float | None

    @property
    def is_lower_bound(self) -> bool:
        """Stale gradients need more updates than this, by an amount that no formula gives."""
        return self.staleness > 0.0


def estimate_others(world: World, effort: Effort, fewest_updates: float, quorum: int, seed: int = 0) -> list[Estimate]:
    """Async, softsync, k-batch and deadline beside a split with this quorum."""
    machines = world.machines
    policies: list[tuple[str, Policy]] = [
        (f"k-batch {quorum}/{machines}", KBatchSync(quorum)),
        (f"deadline {machines}", Deadline()),
        (f"softsync {quorum}/{machines}", SoftSync(quorum)),
        (f"async {machines}", Async()),
    ]
    played = Played(world)
    return [_estimate(played, effort, fewest_updates, label, policy, seed) for label, policy in policies]


def _estimate(played: Played, effort: Effort, fewest_updates: float, label: str, policy: Policy, seed: int) -> Estimate:
    world = played.world
    engine = Simulated(world.machines, played, model_bytes=world.model_bytes)
    each = policy.begin(world.machines).per_update
    updates = max(_FEWEST_UPDATES, _TICKETS // max(each, 1 if policy.staleness_bound is None else world.machines))
    metrics = train(None, policy, engine, updates=updates, seed=seed, patience_s=math.inf).metrics
    seconds = metrics.seconds / metrics.updates
    if policy.staleness_bound == 0:  # nobody works while the update is made
        seconds += world.overhead_s
    gradients = metrics.applied_tickets / metrics.updates
    needed = float(effort.updates(np.array([gradients]))[0])
    work = metrics.summary()["worker_seconds"]
    return Estimate(
        label=label,
        policy=policy.name,
        seconds_per_update=seconds,
        gradients=gradients,
        staleness=metrics.staleness_mean(),
        updates=needed / fewest_updates,
        time=seconds * (needed if effort.is_absolute else needed / fewest_updates),
        wasted=work["wasted"] / max(work["compute"], 1e-12),
        bytes=metrics.bytes_sent / metrics.updates if world.model_bytes else None,
    )
