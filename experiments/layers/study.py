"""The trials: staleness by depth without gradients, then trainings with real ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from experiments.common.tuning import tuned
from experiments.layers.deep_digits import DeepDigits, DeepNet, Diverged
from experiments.layers.profiles import PROFILES
from experiments.layers.published import WORKERS
from experiments.layers.simulator import NoNet, run_layers
from experiments.layers.timing import FORWARD, timing_of

EQUAL, INCEPTION = "equal", "Inception v3 by multiplications"
#: Workers that are alike: steps differ by a fifth.
USUAL = "lognormal:1,0.2"
#: Shares of a step in transit, each way. At 0.18 the top layer is as stale as in the paper: half of 14.5 / 39.
TRANSITS = (0.05, 0.1, 0.18, 0.3)


# ---------------------------------------------------------------- staleness by depth


@dataclass(frozen=True)
class Depth:
    """One run without gradients."""

    profile: str
    read: str
    write: str
    forward: float
    transit: float
    latency: str
    workers: int
    tickets: int
    seed: int


class Staleness(NamedTuple):
    """Of one layer, bottom first from 1, in updates."""

    layer: int
    mean: float
    lowest: int
    low: int  # 2.5 % are below
    high: int  # 2.5 % are above
    highest: int


@dataclass(frozen=True)
class Setting:
    """How much is run."""

    tickets: int = 4000
    seeds: int = 5
    updates: int = 1500
    rates: tuple[float, ...] = (0.01, 0.02, 0.04, 0.08)
    most_rates: int = 6
    trainings: int = 5


QUICK = Setting(tickets=200, seeds=2, updates=60, rates=(0.02, 0.04), most_rates=2, trainings=2)


def wanted_depths(setting: Setting) -> Iterator[Depth]:
    """Profiles, then what else could matter: transit, the share of forward, how times differ, how reading is done."""
    by_layer, early = MODES["layer by layer"], MODES["written by layer"]
    cases: list[tuple[str, str, str, float, float, str]] = [
        *((profile, *how, FORWARD, 0.0, USUAL) for how in (by_layer, early) for profile in PROFILES),
        *((INCEPTION, *by_layer, FORWARD, transit, USUAL) for transit in TRANSITS),
        *((EQUAL, *how, forward, 0.0, USUAL) for how in (by_layer, early) for forward in (0.25, 0.5)),
        *((EQUAL, *early, FORWARD, 0.0, latency) for latency in LATENCIES.values()),
        *((EQUAL, *how, FORWARD, 0.0, USUAL) for how in MODES.values()),
    ]
    for case in dict.fromkeys(cases):
        for seed in range(1, setting.seeds + 1):
            yield Depth(*case, WORKERS, setting.tickets, seed)


#: How the steps of workers differ, for the spread of staleness around its mean.
LATENCIES = {
    "nearly equal": "lognormal:1,0.02",
    "lognormal, s = 0.2": USUAL,
    "lognormal, s = 0.5": "lognormal:1,0.5",
    "exponential": "shifted-exp:0.5,0.5",
    "measured (chen2016)": "chen2016",
}


def run_depth(trial: Depth) -> list[Staleness]:
    """Staleness by layer, once the start is forgotten: there all workers begin at the same moment."""
    timing = timing_of(
        PROFILES[trial.profile], read=trial.read, write=trial.write, forward=trial.forward, transit=trial.transit
    )
    tickets = run_layers(timing, trial.latency, trial.workers, trial.seed, NoNet())
    forgotten = trial.tickets // 4
    seen = [applied.staleness for applied in islice(tickets, forgotten, forgotten + trial.tickets)]
    rows = []
    for layer, values in enumerate(zip(*seen, strict=True), 1):
        ordered = sorted(values)
        cut = len(ordered) // 40
        mean = sum(ordered) / len(ordered)
        rows.append(Staleness(layer, mean, ordered[0], ordered[cut], ordered[-1 - cut], ordered[-1]))
    return rows


# ---------------------------------------------------------------- trainings

#: How parameters are read and gradients written; each is tuned for itself.
MODES = {
    "whole model": ("early", "at the end"),
    "layer by layer": ("late", "at once"),
    "read by layer": ("late", "at the end"),
    "written by layer": ("early", "at once"),
}
#: No staleness at all, for comparison: the same updates by one worker.
ALONE = "one worker"


@dataclass(frozen=True)
class Training:
    """One training; seed 0 is the tuning's."""

    mode: str
    lr: float
    updates: int
    seed: int


class Point(NamedTuple):
    """A version of a training on the test data. `diverged`: nothing finite came after it."""

    update: int
    accuracy: float
    test_loss: float
    staleness: float  # mean over layers, of the tickets since the last point
    diverged: int


TrainingsFound = dict[Training, list[Point]]


def wanted_trainings(setting: Setting, found: TrainingsFound) -> Iterator[Training]:
    """The tuning of every mode, then its best rate with other seeds."""
    chosen = []
    for mode in (*MODES, ALONE):

        def make(lr: float, mode: str = mode) -> Training:
            return Training(mode, lr, setting.updates, 0)

        def score(trial: Training) -> float | None:
            return goodness(found[trial]) if trial in found else None

        trials, best = tuned(setting.rates, make, score, setting.most_rates)
        yield from trials
        if best is not None:
            chosen.append(best)
    for seed in range(1, setting.trainings + 1):
        for best in chosen:
            yield Training(best.mode, best.lr, best.updates, seed)


def goodness(points: list[Point]) -> float:
    """More is better; finer than the accuracy of 359 pictures: e to the minus test loss, 0 where it diverged."""
    last = points[-1]
    return 0.0 if last.diverged or not math.isfinite(last.test_loss) else math.exp(-last.test_loss)


def run_training(trial: Training) -> list[Point]:
    """Train on really mixed versions, and measure ten times on the way."""
    torch.set_num_threads(1)
    read, write = MODES["whole model"] if trial.mode == ALONE else MODES[trial.mode]
    timing = timing_of(PROFILES[EQUAL], read=read, write=write)
    net = DeepNet(DeepDigits(lr=trial.lr, updates=trial.updates), trial.seed)
    workers = 1 if trial.mode == ALONE else WORKERS
    points: list[Point] = []
    every, total, count = max(1, trial.updates // 10), 0.0, 0
    try:
        for update, applied in enumerate(
            islice(run_layers(timing, USUAL, workers, trial.seed, net), trial.updates), start=1
        ):
            total, count = total + sum(applied.staleness) / len(applied.staleness), count + 1
            if update % every == 0:
                measures = net.evaluate()
                points.append(Point(update, measures["accuracy"], measures["test_loss"], total / count, 0))
                total, count = 0.0, 0
    except Diverged:
        last = points.pop() if points else Point(0, math.nan, math.nan, 0.0, 0)
        points.append(last._replace(diverged=1))
    return points
