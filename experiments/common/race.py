"""Methods that race in virtual time: each tuned on the same budget, then run with several seeds for the same seconds.

The trials of such an experiment are these, whatever is trained: rates are tried with one seed over a shorter time; the
best one of each method is run with the other seeds over the whole time, under every latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import quorate
from experiments.common.curves import Point, train_curve
from experiments.common.trials import Found
from experiments.common.tuning import tuned
from quorate.reporting.figures import COLOURS

TUNING_SEED = 0
#: Updates that are simulated without gradients to know what one takes.
_TIMED_UPDATES = 3000


@dataclass(frozen=True)
class Trial:
    """One training. seconds: how long it is, in virtual time. protocol: how it is trained; "" is the race's own way."""

    method: str
    latency: str
    lr: float
    seed: int
    seconds: float
    protocol: str = ""


@dataclass(frozen=True)
class Method:
    """A policy on so many workers, with the rates to begin with.

    dashed: to tell two of one colour apart.
    panel: where its curve is drawn, if not in every panel.
    """

    name: str
    policy: quorate.Policy
    workers: int
    rates: tuple[float, ...]
    dashed: bool = False
    panel: str = ""

    @property
    def title(self) -> str:
        """Its name in figures: a split alone does not say what it is."""
        return f"backup {self.name}" if self.policy.name == "backup" else self.name

    @property
    def colour(self) -> str:
        return "#000000" if self.workers == 1 else COLOURS[self.policy.name]


@dataclass(frozen=True)
class Control:
    """Trainings beside the race: a method at a rate that the race tuned, for itself or for another method.

    times: the rate, as a multiple of the tuned one of `rate_of` (default: of the method itself).
    share: of the race's time. equal_updates: instead, as many updates as the reference has in the race's time.
    seeds, latencies: None: those of the race, and its first latency.
    """

    method: str
    times: float = 1.0
    rate_of: str = ""
    protocol: str = ""
    share: float = 1.0
    equal_updates: bool = False
    seeds: tuple[int, ...] | None = None
    latencies: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Race:
    """Who takes part, and how long it is.

    latencies: the first is that of the tuning.
    measure: its name among what the task's `evaluate` gives. rising: more is better.
    unit: what a learning curve's axis says.
    reference: the method that others are compared with.
    targets: of the measure; none: what the reference has in its worst seed after a quarter, half and all of the time.
    together: of the simulated engine; True where a CPU, too, is quicker with a round as one batch.
    shares: of the time; synchronous methods of several workers are also run to the end of so much of it, under the
        first latency: that says more than what a longer training had by then, its rate still high.
    halved: methods that are also run at half their rate, each with a share of the time, under the first latency: shows
        whether what came out hangs on the rate, which was tuned over a shorter time.
    own_protocol: how the race itself trains, for legends beside controls that do otherwise.
    untuned: methods that only controls have, at rates of others.
    controls: trainings beside the race, in this order, once the rest is there.
    averaged_share: the parameters measured are an average that looks back over this share of the updates; 0: none.
    tuned_with: what a rate is judged by, which should not be the test data.
    last: evaluations whose mean is the final measure, and has to reach a target, where one alone is too noisy.
    """

    methods: tuple[Method, ...]
    latencies: tuple[str, ...]
    seconds: float
    tuning_seconds: float
    seeds: tuple[int, ...]
    measure: str
    unit: str
    rising: bool
    reference: str
    targets: tuple[float, ...] = ()
    last: int = 1
    shares: tuple[float, ...] = ()
    halved: tuple[tuple[str, float], ...] = ()
    own_protocol: str = ""
    untuned: tuple[Method, ...] = ()
    controls: tuple[Control, ...] = ()
    averaged_share: float = 0.0
    tuned_with: str = "held-back data"
    most_rates: int = 6
    evaluations: int = 40
    together: bool | None = None

    def method(self, name: str) -> Method:
        return next(method for method in (*self.methods, *self.untuned) if method.name == name)

    # ------------------------------------------------------------ what is trained

    def wanted(self, found: Found[Trial, Point]) -> Iterable[Trial]:
        """All trials, as far as they are known: tuning first, then seed by seed."""
        rates: dict[str, float] = {}
        for method in self.methods:
            trials, best = self.tuning(method, found)
            yield from trials
            if best is not None:
                rates[method.name] = best.lr
        for latency in self.latencies:
            for seed in self.seeds:
                yield from (Trial(name, latency, rate, seed, self.seconds) for name, rate in rates.items())
        for seconds in self.shorter():
            for seed in self.seeds:
                yield from (
                    Trial(method.name, self.latencies[0], rates[method.name], seed, seconds)
                    for method in self.in_less_time()
                    if method.name in rates
                )
        for name, share in self.halved:
            if name in rates:
                half = Trial(name, self.latencies[0], rates[name] / 2, TUNING_SEED, self.part(share))
                yield from (replace(half, seed=seed) for seed in self.seeds)
        for control in self.controls:
            for latency in control.latencies or self.latencies[:1]:
                yield from self.trials_of(control, found, latency)

    def trials_of(self, control: Control, found: Found[Trial, Point], latency: str) -> list[Trial]:
        """A control's trials under a latency, a seed each; none while its rate is not known."""
        rate = self.rate(control.rate_of or control.method, found)
        if rate is None:
            return []
        seconds = self.part(control.share)
        if control.equal_updates:
            updates = self.updates(Trial(self.reference, latency, rate, TUNING_SEED, self.seconds))
            method = self.method(control.method)
            seconds = float(f"{updates * seconds_an_update(method.policy, method.workers, latency):.6g}")
        first = Trial(control.method, latency, control.times * rate, TUNING_SEED, seconds, control.protocol)
        return [replace(first, seed=seed) for seed in control.seeds or self.seeds]

    def controlled(self, control: Control, found: Found[Trial, Point], latency: str = "") -> list[list[Point]]:
        """The curves of a control, by default under the first latency; those that are there."""
        trials = self.trials_of(control, found, latency or self.latencies[0])
        return [found[trial] for trial in trials if trial in found]

    def part(self, share: float) -> float:
        """A share of the time, in seconds."""
        return float(round(share * self.seconds))

    def shorter(self) -> list[float]:
        """Lengths of trainings that have a share of the time."""
        return [self.part(share) for share in self.shares]

    def in_less_time(self) -> list[Method]:
        """Who is also run with a share of the time."""
        return [method for method in self.methods if method.workers > 1 and method.policy.staleness_bound == 0]

    def tuning(self, method: Method, found: Found[Trial, Point]) -> tuple[list[Trial], Trial | None]:
        """The trials that choose a method's rate, and the best of them once all are there."""
        first = Trial(method.name, self.latencies[0], 0.0, TUNING_SEED, self.tuning_seconds)
        return tuned(
            method.rates,
            lambda rate: replace(first, lr=float(f"{rate:.6g}")),
            lambda trial: self.score(found[trial]) if trial in found else None,
            self.most_rates,
        )

    def score(self, points: Sequence[Point]) -> float:
        """How good a training was in the end; more is better, and what diverged is worst."""
        final = self.final(points)
        if points[-1].diverged or math.isnan(final):
            return -math.inf
        return final if self.rising else -final

    def final(self, points: Sequence[Point]) -> float:
        last = [point.measure for point in points[-self.last :]]
        return sum(last) / len(last)

    # ------------------------------------------------------------ what came out

    def rate(self, name: str, found: Found[Trial, Point]) -> float | None:
        """The tuned rate of a method; None: it is not known yet."""
        best = self.tuning(self.method(name), found)[1]
        return None if best is None else best.lr

    def curves(
        self, name: str, found: Found[Trial, Point], latency: str, seconds: float | None = None, times: float = 1.0
    ) -> list[list[Point]]:
        """All seeds of a method, with its tuned rate or so many times that, over the whole time or less."""
        rate = self.rate(name, found)
        if rate is None:
            return []
        trials = [Trial(name, latency, times * rate, seed, seconds or self.seconds) for seed in self.seeds]
        return [found[trial] for trial in trials if trial in found]

    def all_targets(self, found: Found[Trial, Point], latency: str) -> list[float]:
        """Those given, or what the reference has in its worst seed on its way."""
        curves = self.curves(self.reference, found, latency)
        if self.targets or not curves:
            return list(self.targets)
        worst, best = (min, max) if self.rising else (max, min)
        targets = []
        for share in (0.25, 0.5, 1.0):
            until = share * self.seconds if share < 1 else math.inf
            reached = [[point.measure for point in curve if point.seconds <= until] for curve in curves]
            targets.append(
                worst(best(one) if one else curve[0].measure for one, curve in zip(reached, curves, strict=True))
            )
        return targets

    # ------------------------------------------------------------ one training

    def updates(self, trial: Trial) -> int:
        """How many updates fit into a trial's time."""
        method = self.method(trial.method)
        return max(1, round(trial.seconds / seconds_an_update(method.policy, method.workers, trial.latency)))

    def _together(self, method: Method) -> bool | None:
        """Only a synchronous round can be one batch."""
        return self.together if method.policy.staleness_bound == 0 else None

    def train(self, trial: Trial, task: Any, device: str, **options: Any) -> list[Point]:
        """Train to the end, and measure so often that a curve can be drawn; `options` are those of `quorate.train`."""
        method, updates = self.method(trial.method), self.updates(trial)
        if self.averaged_share:
            options["ema"] = max(0.0, 1 - 1 / (self.averaged_share * updates))
        return train_curve(
            task,
            method.policy,
            quorate.Simulated(method.workers, trial.latency, device=device, together=self._together(method)),
            self.measure,
            updates=updates,
            seed=trial.seed,
            evaluate_every=max(1, updates // self.evaluations),
            **options,
        )


@cache
def seconds_an_update(policy: quorate.Policy, workers: int, latency: str) -> float:
    """The mean, in virtual time; always with the same seed, so that equal trials are equally long."""
    result = quorate.train(None, policy, quorate.Simulated(workers, latency), updates=_TIMED_UPDATES)
    return result.metrics.seconds / result.metrics.updates
