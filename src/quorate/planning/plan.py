"""How many backups to take: from a trace, a latency model or step times to one recommendation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quorate.errors import BadInput, check_at_least
from quorate.latency import Latency, parse_latency
from quorate.planning.exact import exact_means, finite_from
from quorate.planning.fits import Fit, fit_laws
from quorate.planning.from_csv import world_of_csv
from quorate.planning.from_latency import world_of_latency
from quorate.planning.from_trace import FEWEST_ROUNDS, too_few, world_of_trace
from quorate.planning.others import Estimate, estimate_others
from quorate.planning.recommending import Recommendation, recommend, times_to_target
from quorate.planning.resizing import on_network, remove, resize
from quorate.planning.slowness import SlowWorker, find_slow
from quorate.planning.splits import SplitTimes, split_times
from quorate.planning.updates import Effort, effort_of_iterations, effort_of_noise, effort_unknown
from quorate.planning.what_if import WhatIf, parse_what_if
from quorate.planning.world import CANCEL, FINISH, Floats, World

DEFAULT_INTERVAL = 0.05


@dataclass(frozen=True, kw_only=True)
class Split:
    """N+b: one row of a plan."""

    quorum: int
    backups: int
    mean: float  # seconds per update; inf where it has no mean
    low: float  # 95 % interval of the mean
    high: float
    median: float
    p99: float
    updates: float  # to the target, relative to the split that needs fewest
    time: float
    wasted: float  # share of computing
    bytes: float | None  # sent per update


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything `quorate plan` says."""

    machines: int
    source: str
    rounds: int
    late: str
    splits: tuple[Split, ...]
    others: tuple[Estimate, ...]
    recommendation: Recommendation
    slow: tuple[SlowWorker, ...]
    fits: tuple[Fit, ...]
    effort: Effort
    notes: tuple[str, ...]
    what_if: tuple[tuple[str, Plan], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON values; infinite and unknown numbers are null."""
        found = self.recommendation
        return {
            "machines": self.machines,
            "source": self.source,
            "rounds": self.rounds,
            "late": self.late,
            "updates_from": self.effort.sentence,
            "recommendation": {
                "policy": found.policy,
                "quorum": found.quorum,
                "backups": found.backups,
                "seconds_per_update": _number(found.seconds_per_update),
                "time": _number(found.time),
                "speedup": found.speedup,
                "reason": found.reason,
                "changes": list(found.changes),
            },
            "splits": [_split_dict(split) for split in self.splits],
            "others": [_estimate_dict(estimate) for estimate in self.others],
            "slow_workers": [
                {
                    "worker": slow.worker,
                    "factor": slow.factor,
                    "part": slow.part,
                    "gain_removed": slow.gain_removed,
                    "gain_less_work": slow.gain_less_work,
                }
                for slow in self.slow
            ],
            "fits": [
                {
                    "law": fit.text,
                    "distance": fit.distance,
                    "quantiles": [
                        {"level": level, "measured": measured, "fitted": fitted}
                        for level, measured, fitted in fit.points
                    ],
                }
                for fit in self.fits
            ],
            "notes": list(self.notes),
            "what_if": [{"what_if": text, **plan.as_dict()} for text, plan in self.what_if],
        }


def plan(
    *sources: str | Path,
    latency: str | Latency | None = None,
    machines: int | None = None,
    noise_scale: float | None = None,
    iterations: str | None = None,
    batch_size: int | None = None,
    model_bytes: int | None = None,
    late: str | None = None,
    interval: float = DEFAULT_INTERVAL,
    what_if: Sequence[str] = (),
    seed: int = 0,
) -> Plan:
    """Which split of the machines into a quorum and backups reaches a target soonest.

    sources: the trace or the folder of a run, or CSV files of step times; or none, and `latency` a model or its text.
    machines: how many there are (default: as many as were measured).
    noise_scale: the gradient noise scale in samples; iterations: updates to the target, "QUORUM:THOUSANDS,…".
    late: whether late work is cancelled or left to finish (default: as in the trace, else cancelled).
    interval: half the width of the 95 % interval that is wanted, as a share of the mean.
    what_if: changes to plan again with, e.g. "machines=200", "without=3", "bandwidth=1Gbps".
    """
    changes = [parse_what_if(text) for text in what_if]
    if machines is not None:
        check_at_least("machines", machines, 1)
    _check_numbers(noise_scale, interval, batch_size, model_bytes)
    if late not in (None, CANCEL, FINISH):
        raise BadInput(f"late is {late!r}, but late work can be one of: {CANCEL}, {FINISH}")
    model = parse_latency(latency) if isinstance(latency, str) else latency
    world, own_late = _world(sources, model, machines, seed)
    world = replace(world, model_bytes=model_bytes or world.model_bytes, batch_size=batch_size or world.batch_size)
    if noise_scale is not None and iterations is not None:
        raise BadInput("both a noise scale and iterations are given; give one of the two")
    maker = _Maker(
        model=model,
        effort=_effort(world, noise_scale, iterations),
        late=late or own_late,
        interval=interval,
        seed=seed,
        asked=machines,
    )
    base = maker.make(world, None)
    return replace(base, what_if=tuple((change.text, maker.make(world, change)) for change in changes))


def _check_numbers(noise_scale: float | None, interval: float, batch_size: int | None, model_bytes: int | None) -> None:
    if noise_scale is not None and not (0 <= noise_scale < math.inf):
        raise BadInput(f"noise_scale is {noise_scale}, but it is a number of samples, at least 0")
    if not 0 < interval < 1:
        raise BadInput(f"interval is {interval}, but it is a share of the mean, e.g. 0.05 for ±5 %")
    if batch_size is not None:
        check_at_least("batch_size", batch_size, 1)
    if model_bytes is not None:
        check_at_least("model_bytes", model_bytes, 1)


def _world(sources: Sequence[str | Path], model: Latency | None, machines: int | None, seed: int) -> tuple[World, str]:
    """The world of what was given, and what it does with late work."""
    paths = [Path(source) for source in sources]
    if bool(paths) == (model is not None):
        raise BadInput("give either a trace or step times (FILE) or a latency model (--latency), one of the two")
    if model is not None:
        if machines is None:
            raise BadInput("a latency model says nothing of how many machines there are; give machines (--machines)")
        return world_of_latency(model, machines, seed), CANCEL
    if _is_table(paths[0]):
        return world_of_csv(paths), CANCEL
    if len(paths) > 1:
        raise BadInput(
            f"{len(paths)} traces are given, but a plan is made from one; only step times (CSV) may be several"
        )
    return world_of_trace(paths[0])


def _is_table(path: Path) -> bool:
    """Whether a file is a CSV: by its name, or else by its first line, which in a trace is a JSON object."""
    if path.suffix.lower() == ".csv":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(200).lstrip()
    return b"seconds" in head and not head.startswith(b"{")


def _effort(world: World, noise_scale: float | None, iterations: str | None) -> Effort:
    if iterations is not None:
        return effort_of_iterations(iterations)
    if noise_scale is not None:
        if world.batch_size is None:
            raise BadInput("a noise scale is given, but not how many samples a worker's batch has; give --batch-size")
        return effort_of_noise(noise_scale, world.batch_size, "given")
    if world.noise_scale is not None and world.batch_size is not None:
        return effort_of_noise(world.noise_scale, world.batch_size, "measured during the run")
    return effort_unknown()


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes a plan of a world, as it is or with one thing changed."""

    model: Latency | None
    effort: Effort
    late: str
    interval: float
    seed: int
    asked: int | None  # machines

    def make(self, world: World, change: WhatIf | None) -> Plan:
        measured, model = world, self.model
        if change is not None and change.without:
            world, model = remove(world, list(change.without)), None
        size = None if change is None else change.machines
        if size is None and self.asked is not None:
            size = self.asked - (0 if change is None else len(set(change.without)))
            if size < 1:
                raise BadInput(
                    f"what-if {change.text if change else ''!r} leaves no machine of {self.asked}; name fewer"
                )
        if size is not None and size != world.machines:
            world = world_of_latency(model, size, self.seed) if model is not None else resize(world, size, self.seed)
        if change is not None and change.network is not None:
            world, model = on_network(world, change.network), None
        times = split_times(world, self.late)
        if model is not None:
            times = _made_exact(times, model, world.machines, self.late)
        notes = [*world.notes]
        if self.model is not None and (least := finite_from(self.model)) is not None:
            times = _made_endless(times, self.model, least, self.late)
            notes.append(f"the mean of {self.model.text()} is infinite: an update has a mean from b={least} backups on")
        found = recommend(times, self.effort, world.known)
        notes += self._too_wide(world, times, found)
        if (beyond := self.effort.beyond(found.quorum)) is not None:
            notes.append(beyond)
        relative, time = times_to_target(times, self.effort)
        fewest = float(self.effort.updates(times.gradients).min())
        return Plan(
            machines=world.machines,
            source=world.source,
            rounds=world.rounds,
            late=self.late,
            splits=tuple(_splits(times, relative, time, world.model_bytes)),
            others=tuple(estimate_others(world, self.effort, fewest, found.quorum, self.seed)),
            recommendation=found,
            slow=tuple(find_slow(world, self._best_time)) if world.machines > 2 else (),
            fits=tuple(fit_laws(measured.seconds)),
            effort=self.effort,
            notes=tuple(notes),
        )

    def _best_time(self, world: World, shares: Floats) -> float:
        """Time of the best split, when workers bring gradients of different weight."""
        times = split_times(world, self.late, roughly=True)
        if (shares != 1.0).any():
            order = np.argsort(world.seconds, axis=1)
            weight = np.cumsum(shares[order], axis=1).mean(axis=0)
            times = replace(times, gradients=weight)
        updates = self.effort.updates(times.gradients)
        return float((times.mean * updates)[: world.known].min())

    def _too_wide(self, world: World, times: SplitTimes, found: Recommendation) -> list[str]:
        """Refuse what cannot be decided, and say how many rounds the interval that is wanted would take."""
        if self.model is not None:
            return []
        place = found.quorum - 1
        half = (times.high[place] - times.low[place]) / 2 / times.mean[place]
        needed = math.ceil(world.rounds * (half / self.interval) ** 2) if math.isfinite(half) else None
        if world.rounds < FEWEST_ROUNDS:
            raise too_few(world.source, world.rounds, needed)
        if half <= self.interval or needed is None:
            return []
        return [
            f"±{half:.0%} is wider than the ±{self.interval:.0%} wanted: {world.source} has {world.rounds:,} rounds, "
            f"and about {needed:,} are needed"
        ]


def _made_exact(times: SplitTimes, model: Latency, machines: int, late: str) -> SplitTimes:
    """Means by formula, where there is one; drawn ones beside them keep their medians and tails."""
    exact = exact_means(model, machines) if late == CANCEL else None
    return times if exact is None else replace(times, mean=exact, low=exact, high=exact)


def _made_endless(times: SplitTimes, model: Latency, least: int, late: str) -> SplitTimes:
    """Splits with fewer than `least` backups have no mean, whatever was drawn; refused where none has."""
    if late == FINISH:
        raise BadInput(
            f"the mean of {model.text()} is infinite, and late work is left to finish: in the long run every worker is "
            f"stuck, whatever the split; cancel late work (--late cancel), and an update has a mean from b={least} on"
        )
    machines = len(times.mean)
    if machines <= least:
        raise BadInput(
            f"the mean of {model.text()} is infinite: an update has a mean from b={least} backups on, which takes "
            f"{least + 1} machines or more; give more (--machines)"
        )
    endless = machines - np.arange(1, machines + 1) < least
    return replace(times, mean=np.where(endless, math.inf, times.mean), high=np.where(endless, math.inf, times.high))


def _splits(times: SplitTimes, relative: Floats, time: Floats, model_bytes: int | None) -> list[Split]:
    machines = len(time)
    return [
        Split(
            quorum=place + 1,
            backups=machines - place - 1,
            mean=float(times.mean[place]),
            low=float(times.low[place]),
            high=float(times.high[place]),
            median=float(times.median[place]),
            p99=float(times.p99[place]),
            updates=float(relative[place]),
            time=float(time[place]),
            wasted=float(times.wasted[place]),
            bytes=None if model_bytes is None else float(times.transfers[place]) * model_bytes,
        )
        for place in range(machines)
    ]


def _split_dict(split: Split) -> dict[str, Any]:
    seconds = {name: _number(getattr(split, name)) for name in ("mean", "low", "high", "median", "p99")}
    return {
        "quorum": split.quorum,
        "backups": split.backups,
        "update_seconds": seconds,
        "updates": split.updates,
        "time": _number(split.time),
        "wasted": split.wasted,
        "bytes": split.bytes,
    }


def _estimate_dict(estimate: Estimate) -> dict[str, Any]:
    return {**vars(estimate), "is_lower_bound": estimate.is_lower_bound}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
