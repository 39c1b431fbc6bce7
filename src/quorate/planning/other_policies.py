"""Estimates for async, softsync, k-batch and deadline, by simulation in the same world."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from quorate.engines import Simulated
from quorate.latency.base import Draw, Latency
from quorate.planning.world import Effort, World
from quorate.policies import Async, Deadline, KBatchSync, Policy, SoftSync
from quorate.seeds import derive, uniform
from quorate.training import train


@dataclass(frozen=True, eq=False)
class WorldLatency(Latency):
    """Latency model that replays the rounds of a world.

    The virtual clock selects the stretch; a random round of that stretch gives the times of all workers.
    """

    world: World
    rows: list[list[float]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.world.seconds.tolist())

    def sampler(self, seed: int, workers: int) -> Draw:
        assert workers == self.world.machines
        rows = self.rows
        begins = [regime.start for regime in self.world.regimes]
        lengths = [regime.stop - regime.start for regime in self.world.regimes]
        until_s = np.cumsum([self.world.span_s[regime].sum() for regime in self.world.regimes]).tolist()
        total_s, last = until_s[-1], len(begins) - 1
        key = derive(seed, "planning.world")

        def draw(worker: int, _step: int, row: int, time_s: float) -> float:
            stretch = min(bisect_right(until_s, time_s % total_s), last) if last else 0
            seconds: float = rows[begins[stretch] + int(uniform(key, row) * lengths[stretch])][worker]
            return seconds

        return draw

    def mean(self) -> float:
        return float(self.world.seconds.mean())

    def longest(self) -> float:
        return float(self.world.seconds.max())

    def text(self) -> str:
        return f"world:{self.world.source}"


_TICKETS = 8_000  # per simulation: 0.1 to 0.2 seconds
_FEWEST_UPDATES = 40


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds per update and time to the target of one policy, comparable with those of the splits."""

    label: str
    policy: str
    seconds_per_update: float
    gradients: float  # per update
    staleness: float  # mean, in updates
    updates: float  # relative to the split that needs fewest, without the cost of staleness
    time: float
    wasted: float
    bytes: float | None

    @property
    def is_lower_bound(self) -> bool:
        """Whether gradients are stale: they need more updates than `updates`, by an unknown amount."""
        return self.staleness > 0.0


def estimate_others(world: World, effort: Effort, fewest_updates: float, quorum: int, seed: int = 0) -> list[Estimate]:
    """Estimates of k-batch, deadline, softsync and async for this quorum."""
    machines = world.machines
    policies: list[tuple[str, Policy]] = [
        (f"k-batch {quorum}/{machines}", KBatchSync(quorum)),
        (f"deadline {machines}", Deadline()),
        (f"softsync {quorum}/{machines}", SoftSync(quorum)),
        (f"async {machines}", Async()),
    ]
    latency = WorldLatency(world)
    return [_estimate(latency, effort, fewest_updates, label, policy, seed) for label, policy in policies]


def _estimate(
    latency: WorldLatency, effort: Effort, fewest_updates: float, label: str, policy: Policy, seed: int
) -> Estimate:
    world = latency.world
    engine = Simulated(world.machines, latency, model_bytes=world.model_bytes)
    each = policy.begin(world.machines).per_update
    updates = max(_FEWEST_UPDATES, _TICKETS // max(each, 1 if policy.staleness_bound is None else world.machines))
    metrics = train(None, policy, engine, updates=updates, seed=seed, patience_s=math.inf).metrics
    seconds = metrics.seconds / metrics.updates
    if policy.staleness_bound == 0:  # workers are idle while the update is made
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
