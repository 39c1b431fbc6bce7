"""Who takes part, on how many machines, and how slow these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import quorate

SEEDS = (1, 2, 3, 4, 5)
MACHINES = (16, 64)
BATCH = 8
#: Virtual seconds that every training has, whatever it does with them.
BUDGET_S = 120.0

#: Test accuracy to reach: with a rate that suits it, full sync ends five points above.
TARGET = 0.88

LATENCIES = {
    "chen2016": "chen2016",
    "heavy tail": "pareto:0.6,1.6",
    "one slow": "lognormal:1.5,0.1*slow:0=5",
}


class Method(NamedTuple):
    """A contestant: its policy by the number of machines, and how its gradients become updates."""

    name: str
    family: str  # a policy's name, which has its colour
    policy: Callable[[int], quorate.Policy]
    learning: Mapping[str, float] = {}  # clipping and delay compensation, as quorate.train takes them
    momentum: float = 0.9

    @property
    def is_stale(self) -> bool:
        """Whether gradients of other versions are applied: such methods begin their search at lower rates."""
        return self.family in ("async", "softsync", "bounded")


def _backup(share: float) -> Callable[[int], quorate.Policy]:
    def made(machines: int) -> quorate.Policy:
        backups = max(1, round(share * machines))
        return quorate.BackupSync(machines - backups, backups)

    return made


def _async(**options: bool) -> Callable[[int], quorate.Policy]:
    return lambda _: quorate.Async(**options)


CLIP_NORM = 1.0
METHODS = (
    Method("full sync", "full-sync", lambda _: quorate.FullSync()),
    Method("full sync, clipped", "full-sync", lambda _: quorate.FullSync(), {"clip_norm": CLIP_NORM}),
    Method("backups 6 %", "backup", _backup(1 / 16)),
    Method("backups 25 %", "backup", _backup(1 / 4)),
    Method("backups 25 %, clipped", "backup", _backup(1 / 4), {"clip_norm": CLIP_NORM}),
    Method("adaptive backups", "adaptive", lambda _: quorate.AdaptiveBackup()),
    Method("deadline", "deadline", lambda _: quorate.Deadline()),
    Method("k-batch", "k-batch", quorate.KBatchSync),
    Method("softsync", "softsync", lambda machines: quorate.SoftSync(machines // 4)),
    Method("softsync, 1/τ", "softsync", lambda machines: quorate.SoftSync(machines // 4, staleness_weights=True)),
    Method("bounded staleness", "bounded", lambda _: quorate.BoundedStaleness(2)),
    Method("async", "async", _async()),
    Method("async, no momentum", "async", _async(), momentum=0.0),
    Method("async, 1/τ", "async", _async(staleness_weights=True)),
    Method("async, clipped", "async", _async(), {"clip_norm": CLIP_NORM}),
    Method("async, stale dropped", "async", lambda machines: quorate.Async(max_staleness=machines)),
    Method("DC-ASGD, λ 64", "async", _async(), {"delay_compensation": 64.0}),
    Method("DC-ASGD, λ 1024", "async", _async(), {"delay_compensation": 1024.0}),
)
BY_NAME = {method.name: method for method in METHODS}
QUICK_METHODS = ("full sync", "backups 25 %", "async")

#: In factors of 2, as many for each; the search goes on beyond an edge that is best.
RATES_FRESH = (0.2, 0.4, 0.8)
RATES_STALE = (0.0025, 0.005, 0.01)
MOST_RATES = 6


@dataclass(frozen=True)
class Trial:
    """One contestant on one cluster: its rate is tuned, then it runs with every seed."""

    machines: int
    latency: str
    method: str


def all_trials() -> list[Trial]:
    return [Trial(*one) for one in product(MACHINES, LATENCIES, BY_NAME)]


def quick_trials() -> list[Trial]:
    return [Trial(4, "heavy tail", method) for method in QUICK_METHODS]


def first_rates(method: Method, machines: int) -> Sequence[float]:
    """Where the search for a rate begins: the staler, the lower; higher without momentum, or with 1/τ weights."""
    if not method.is_stale:
        return RATES_FRESH
    policy = method.policy(machines).begin(machines)
    factor = min(16.0, 16 / machines * policy.per_update)
    if not method.momentum:
        factor *= 10
    if method.name == "async, 1/τ":  # softsync of a quarter has a staleness of 4, which the search makes up for
        factor *= machines
    return tuple(factor * rate for rate in RATES_STALE)
