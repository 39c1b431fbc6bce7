"""`quorate.plan`: from a trace, a latency model or step times to a plan with one recommendation."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quorate.errors import BadInput, check_at_least
from quorate.latency import Latency, parse_latency
from quorate.latency.step_times import is_table
from quorate.number_format import duration, number, percent, seconds, three
from quorate.planning.fits import Fit, fit_laws
from quorate.planning.other_policies import Estimate, estimate_others
from quorate.planning.recommendation import DEFAULT_INTERVAL, Recommendation, recommend, times_to_target, why_not
from quorate.planning.scenarios import MOST_MACHINES, WhatIf, on_network, parse_what_if, remove, resize
from quorate.planning.sources import FEWEST_ROUNDS, too_few, world_of_csv, world_of_latency, world_of_trace
from quorate.planning.splits import SplitTimes, exact_means, finite_from, split_times
from quorate.planning.world import (
    CANCEL,
    FINISH,
    Effort,
    Floats,
    World,
    effort_of_iterations,
    effort_of_noise,
    effort_unknown,
)

_AT_LEAST = 1.2  # factor over the median worker; smaller factors are not reported
_BLOCKS = 8  # parts of the run; a slow worker is slow in nearly all of them
_ALWAYS = 0.85
_MOST_GAINS = 5  # slow workers whose gains are computed; each takes two plans


@dataclass(frozen=True, kw_only=True)
class SlowWorker:
    """A worker that is always slow, not by chance, and the gain of two remedies.

    A backup hides a worker that happens to be slow; it cannot make a machine faster. The gradient of a worker that is
    always slow is dropped in every round: the worker computes for nothing, and uses up a backup.
    """

    worker: int
    factor: float  # over the median worker
    part: str | None  # data, compute or transfer; None if not measured
    is_bound: bool  # it hardly ever finished: the factor is a lower bound
    gain_removed: float | None  # relative gain in time to the target if it is removed
    gain_less_work: float | None  # relative gain if its batch shrinks by its factor
    of_two: bool = False  # the factor is over the only other worker

    def sentence(self) -> str:
        how = "at least " if self.is_bound else ""
        where = f", in {self.part}" if self.part else ""
        beside = "the other worker" if self.of_two else "the middle worker"
        advice = []
        if self.gain_removed is not None:
            advice.append(f"removing it {_gain(self.gain_removed)}, with one machine less")
        if self.gain_less_work is not None:
            advice.append(f"giving it {percent(1 / self.factor)} of the work {_gain(self.gain_less_work)}")
        text = f"worker {self.worker} is always slow ({how}{number(self.factor)}× {beside}{where})"
        return f"{text}: a backup does not cure that; {', and '.join(advice)}" if advice else text


def _gain(gain: float) -> str:
    if abs(gain) < 0.005:
        return "costs nothing"
    return f"gains {percent(gain)}" if gain > 0 else f"costs {percent(-gain)}"


def find_slow(world: World, best_time: Callable[[World, Floats], float]) -> list[SlowWorker]:
    """Workers that are always slow, the slowest first.

    `best_time(world, shares)` returns the time to the target of the best split; `shares` are batch sizes relative to
    the usual one.
    """
    ratios = _ratios(world.seconds)
    found: list[SlowWorker] = []
    columns = [
        column
        for column in range(world.machines)
        if _is_always_slow(ratios[:, column]) or world.workers[column] in world.unseen
    ]
    if not columns or 2 * len(columns) >= max(world.machines, 3):
        return []
    ones = np.ones(world.machines)
    now = best_time(world, ones)
    factors = np.median(ratios, axis=0)
    columns.sort(key=lambda column: -float(factors[column]))
    for column in columns:
        worker, factor = world.workers[column], float(factors[column])
        gain_removed = gain_less_work = None
        if len(found) < _MOST_GAINS:
            rest = [other for other in range(world.machines) if other != column]
            if len(rest) > 1:
                gain_removed = now / best_time(world.with_columns(rest), ones[rest]) - 1.0
            seconds, shares = world.seconds.copy(), ones.copy()
            seconds[:, column] /= factor
            shares[column] = 1.0 / factor
            gain_less_work = now / best_time(replace(world, seconds=seconds), shares) - 1.0
        found.append(
            SlowWorker(
                worker=worker,
                factor=factor,
                part=(world.slowest_part or {}).get(worker),
                is_bound=worker in world.unseen,
                gain_removed=gain_removed,
                gain_less_work=gain_less_work,
                of_two=world.machines == 2,
            )
        )
    return found


def _ratios(seconds: Floats) -> Floats:
    """Times relative to the median of their round (the shorter of two): slowness that all workers share cancels."""
    middle = np.median if seconds.shape[1] > 2 else np.min
    return np.asarray(seconds / middle(seconds, axis=1, keepdims=True), dtype=np.float64)


def _is_always_slow(ratios: Floats) -> bool:
    blocks = np.array([np.median(block) for block in np.array_split(ratios, min(_BLOCKS, len(ratios)))])
    return bool((blocks >= _AT_LEAST).mean() >= _ALWAYS and (ratios > 1.0).mean() >= _ALWAYS)


# ---------------------------------------------------------------- the plan


_UPDATE_SECONDS = ("mean", "low", "high", "median", "p99")
_SLOW_WORKER = ("worker", "factor", "part", "gain_removed", "gain_less_work")
_MOST_FINISHING = 2_000  # machines; a plan with that many takes two minutes


@dataclass(frozen=True, kw_only=True)
class Split:
    """N+b: one row of a plan."""

    quorum: int
    backups: int
    mean: float  # seconds per update; may be infinite
    low: float  # 95 % interval of the mean
    high: float
    median: float
    p99: float
    updates: float  # to the target, relative to the split that needs fewest
    time: float
    wasted: float  # share of computing
    bytes: float | None  # sent per update


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Everything that `quorate plan` prints."""

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
    cautions: tuple[str, ...]  # warnings to read before any figure
    notes: tuple[str, ...]
    what_if: tuple[tuple[str, Plan], ...] = ()

    def __repr__(self) -> str:
        found = self.recommendation
        gain = f", ×{three(found.speedup)} against {self.machines}+0" if found.speedup and found.backups else ""
        return f"Plan({'keep' if found.is_kept else 'take'} {found.split} of {self.machines} machines{gain})"

    def _repr_html_(self) -> str:
        """The recommendation and the table of splits, for a notebook; no table if no other split can be judged."""
        found = self.recommendation
        said = [*(f"Careful: {caution}." for caution in self.cautions), self.sentence]
        text = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in said)
        paste = f"<p><code>{html.escape(found.python(self.late), quote=False)}</code></p>"
        if found.is_kept:  # the figures of other splits are invalid
            return text + paste
        rows: list[tuple[str, tuple[str, ...]]] = [("th", ("N+b", "an update", "updates", "time", "wasted"))]
        for split in reversed(self.splits):
            cells = (
                f"{split.quorum}+{split.backups}",
                seconds(split.mean) if math.isfinite(split.mean) else "infinite",
                f"×{number(split.updates)}",
                f"×{number(split.time / found.time)}" if math.isfinite(split.time) else "infinite",
                percent(split.wasted),
            )
            rows.append(("td", tuple(f"<b>{cell}</b>" for cell in cells) if split.quorum == found.quorum else cells))
        table = "".join(f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>" for tag, cells in rows)
        return f"{text}<table>{table}</table>{paste}"

    @property
    def sentence(self) -> str:
        """The recommendation as a sentence."""
        found, full = self.recommendation, self.splits[-1]
        if found.is_kept and math.isnan(found.seconds_per_update):
            return f"No split of {self.machines} machines can be judged from this run, whose workers shared cores."
        pace = f"{seconds(found.seconds_per_update)} an update"
        if found.is_kept:
            return f"Keep {found.split}: {pace}; no other split can be judged from this run."
        if self.effort.is_absolute:
            pace += f", {duration(found.time)} to the target"
        if not found.backups:
            return f"Take {found.split}, no backups: {pace}."
        if found.speedup is None:
            endless = not math.isfinite(full.mean)
            pace += "; waiting for all has no finite mean" if endless else "; how long all of them take was not seen"
        elif self.effort.is_absolute:
            pace += f" against {duration(full.time)} with {full.quorum}+0, ×{three(found.speedup)}"
        else:
            pace += f", ×{three(found.speedup)} as fast to the target as {full.quorum}+0"
        return f"Take {found.split}: {pace}{found.speedup_interval}."

    @property
    def why_not(self) -> list[str]:
        """One sentence for each policy of `others` that is faster but not recommended."""
        return why_not(self.others, self.recommendation)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values; infinite and unknown numbers are null."""
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
                "speedup_low": found.speedup_low,
                "speedup_high": None if found.speedup_high is None else _number(found.speedup_high),
                "against": f"{self.machines}+0",
                "is_guess": found.is_guess,
                "is_kept": found.is_kept,
                "equals": list(found.equals),
                "sentence": self.sentence,
                "reason": found.reason,
                "why_not": self.why_not,
                "changes": list(found.changes),
                "python": found.python(self.late),
                "command": found.command(self.late),
            },
            "cautions": list(self.cautions),
            "splits": [
                {
                    "quorum": split.quorum,
                    "backups": split.backups,
                    "update_seconds": {name: _number(getattr(split, name)) for name in _UPDATE_SECONDS},
                    "updates": split.updates,
                    "time": _number(split.time),
                    "wasted": split.wasted,
                    "bytes": split.bytes,
                }
                for split in self.splits
            ],
            "others": [{**vars(one), "is_lower_bound": one.is_lower_bound} for one in self.others],
            "slow_workers": [{name: getattr(slow, name) for name in _SLOW_WORKER} for slow in self.slow],
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
    """The implementation of `quorate.plan`, whose docstring explains the arguments."""
    changes = [parse_what_if(text) for text in what_if]
    if machines is not None:
        check_at_least("machines", machines, 1, MOST_MACHINES)
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
        machines=machines,
    )
    base = maker.make(world, WhatIf(text=""))
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
    """The world of the given source, and how its run handled late work."""
    paths = [Path(source) for source in sources]
    if bool(paths) == (model is not None):
        raise BadInput("give either a trace or step times (FILE) or a latency model (--latency), one of the two")
    if model is not None:
        if machines is None:
            raise BadInput("a latency model says nothing of how many machines there are; give machines (--machines)")
        return world_of_latency(model, machines, seed), CANCEL
    if is_table(paths[0]):
        return world_of_csv(paths), CANCEL
    if len(paths) > 1:
        raise BadInput(
            f"{len(paths)} traces are given, but a plan is made from one; only step times (CSV) may be several"
        )
    return world_of_trace(paths[0])


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
    """Makes plans that share these settings."""

    model: Latency | None
    effort: Effort
    late: str
    interval: float
    seed: int
    machines: int | None  # as the user gave it

    def make(self, measured: World, change: WhatIf) -> Plan:
        """A plan of this world with the change."""
        world, model = self._changed(measured, change)
        if self.late == FINISH and world.machines > _MOST_FINISHING:
            raise BadInput(
                f"machines is {world.machines:,}, but the limit is {_MOST_FINISHING:,} where late work finishes, "
                f"since its rounds are simulated one by one; give fewer, or cancel late work (--late cancel)"
            )
        times = split_times(world, self.late)
        if model is not None and self.late == CANCEL:
            exact = exact_means(model, world.machines)
            if exact is not None:  # medians and tails stay those of the drawn rounds
                times = replace(times, mean=exact, low=exact, high=exact, blocks=None)
        notes = [*world.notes]
        if self.model is not None and (least := finite_from(self.model)) is not None:
            times = _with_infinite_means(times, self.model, least, self.late)
            notes.append(f"the mean of {self.model.text()} is infinite: an update has a mean from b={least} backups on")
        least_all_s = world.least_all_s if world is measured else None  # only valid for the measured workers
        kept = world.kept_quorum if world.kept_quorum is None or world.machines == measured.machines else 0
        found = recommend(times, self.effort, world.known, self.interval, least_all_s, kept)
        notes += self._width_notes(world, times, found)
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
            others=() if found.is_kept else tuple(estimate_others(world, self.effort, fewest, found.quorum, self.seed)),
            recommendation=found,
            slow=tuple(find_slow(world, self._best_time)) if world.machines > 1 else (),
            fits=tuple(fit_laws(measured.seconds)),
            effort=self.effort,
            cautions=world.cautions,
            notes=tuple(notes),
        )

    def _changed(self, world: World, change: WhatIf) -> tuple[World, Latency | None]:
        """The world after the change; and the latency model, if it still describes that world."""
        model = self.model
        if change.without:
            world, model = remove(world, change.without), None
        size = change.machines
        if size is None and self.machines is not None:
            size = self.machines - len(set(change.without))
            if size < 1:
                raise BadInput(f"what-if {change.text!r} leaves no machine of {self.machines}; name fewer")
        if size is not None and size != world.machines:
            world = world_of_latency(model, size, self.seed) if model is not None else resize(world, size, self.seed)
        if change.network is not None:
            world, model = on_network(world, change.network), None
        return world, model

    def _best_time(self, world: World, shares: Floats) -> float:
        """Time to the target of the best split; `shares` are the weights of the workers' gradients."""
        times = split_times(world, self.late, roughly=True)
        if (shares != 1.0).any():
            order = np.argsort(world.seconds, axis=1)
            weight = np.cumsum(shares[order], axis=1).mean(axis=0)
            times = replace(times, gradients=weight)
        updates = self.effort.updates(times.gradients)
        return float((times.mean * updates)[: world.known].min())

    def _width_notes(self, world: World, times: SplitTimes, found: Recommendation) -> list[str]:
        """A note if the interval is wider than wanted, with the rounds needed; refuses a world with too few rounds."""
        if self.model is not None:
            return []
        place = found.quorum - 1
        half = (times.high[place] - times.low[place]) / 2 / times.mean[place]
        needed = math.ceil(world.rounds * (half / self.interval) ** 2) if math.isfinite(half) else None
        if world.rounds < FEWEST_ROUNDS:
            raise too_few(world.source, world.rounds, needed)
        note = None if needed is None else wider_than_wanted(half, self.interval, world.source, world.rounds, needed)
        return [] if note is None else [note]


def wider_than_wanted(half: float, wanted: float, source: str, rounds: int, needed: int) -> str | None:
    """A sentence if the interval is wider than wanted, in the digits that are shown; else None."""
    if half <= wanted or percent(half) == percent(wanted):
        return None
    return (
        f"±{percent(half)} is wider than the ±{percent(wanted)} wanted: {source} has {rounds:,} rounds, "
        f"and about {needed:,} are needed"
    )


def _with_infinite_means(times: SplitTimes, model: Latency, least: int, late: str) -> SplitTimes:
    """Set the means of splits with fewer than `least` backups to infinity; refuse if no split has a finite mean."""
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
            **{name: float(getattr(times, name)[place]) for name in (*_UPDATE_SECONDS, "wasted")},
            updates=float(relative[place]),
            time=float(time[place]),
            bytes=None if model_bytes is None else float(times.transfers[place]) * model_bytes,
        )
        for place in range(machines)
    ]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
