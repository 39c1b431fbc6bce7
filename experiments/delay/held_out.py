"""The second protocol: rates chosen on training pictures that are held out, and trainings of one length.

The first protocol (settings.py) chose each rate by the test accuracy of trainings a third as long. Here a trial of the
tuning has full length and is measured with held-out pictures; only trials with the chosen rate see the test pictures.
All of them train with the same pictures, those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from experiments.common.trials import Found
from experiments.common.tuning import tuned
from experiments.delay import tiny_imagenet
from experiments.delay.rows import Row, Setting, final_accuracy
from experiments.delay.settings import FULL, MOMENTUM, MOST_TRIED, NETS, QUICK, SEEDS, Length

CIFAR, TINY = "cifar-10", tiny_imagenet.NAME
SPLIT_SEED = 20
QUICK_HELD_OUT = 8
#: Rates are tried from here in factors of 2. At a delay of 1 they end where those of no delay have their best.
_LEAST_RATE = {"alexnet": 0.02, "googlenet": 0.1}
_LOWER_BY = {0: 1, 1: 2, 2: 8, 4: 16}
_RATES = 4
#: Clipping tunes its rate with the first norm, then tries the other norms at the best rate.
CLIP_NORMS = (1.0, 0.25, 4.0)


@dataclass(frozen=True)
class DataSet:
    """Pictures, and how long the nets train with them. held_out: training pictures that choose rates."""

    classes: int
    samples: int
    held_out: int
    epochs: dict[str, int]


DATA_SETS = {
    CIFAR: DataSet(10, 50_000, 5_000, {net: FULL[net].epochs for net in NETS}),
    TINY: DataSet(tiny_imagenet.CLASSES, 10_000, 1_000, dict.fromkeys(NETS, 40)),
}


class Stage(NamedTuple):
    """Trainings that answer one question together."""

    data: str
    delays: tuple[int, ...]
    repair: str


#: In the order of what they are worth, which is the order in which they run.
STAGES = (
    Stage(CIFAR, (0, 1), "lr"),
    Stage(CIFAR, (1,), "clip"),
    Stage(TINY, (0, 1), "lr"),
    Stage(CIFAR, (1,), "warm-up"),
    Stage(CIFAR, (2,), "lr"),
    Stage(CIFAR, (2,), "clip"),
    Stage(CIFAR, (2,), "warm-up"),
    Stage(TINY, (1,), "clip"),
    Stage(TINY, (1,), "warm-up"),
    Stage(TINY, (2,), "lr"),
    Stage(CIFAR, (4,), "lr"),
    Stage(CIFAR, (4,), "clip"),
    Stage(CIFAR, (4,), "warm-up"),
)
REPAIRS = ("lr", "clip", "warm-up")


@dataclass(frozen=True, kw_only=True)
class Trial(Setting):
    """One training. clip: the norm that the gradient of an update is clipped to, 0 for none."""

    data: str
    clip: float = 0.0

    @property
    def guessing(self) -> float:
        return 1 / DATA_SETS[self.data].classes


@dataclass(frozen=True)
class Plan:
    """Which trials there are."""

    stages: tuple[Stage, ...] = STAGES
    seeds: tuple[int, ...] = SEEDS
    rates: int = _RATES
    most_tried: int = MOST_TRIED


FULL_PLAN = Plan()
QUICK_PLAN = Plan(STAGES[:3], seeds=(1,), rates=2, most_tried=2)


def length_of(data: str, net: str, quick: bool = False) -> Length:
    """How long and how large a training is; those of the tuning are no shorter."""
    if quick:
        return replace(QUICK, tuning_epochs=QUICK.epochs, train_samples=QUICK.train_samples - QUICK_HELD_OUT)
    one = DATA_SETS[data]
    return Length(
        epochs=one.epochs[net],
        tuning_epochs=one.epochs[net],
        batch_size=FULL[net].batch_size,
        train_samples=one.samples - one.held_out,
    )


def split(train: TensorDataset, held_out: int) -> tuple[TensorDataset, TensorDataset]:
    """Pictures to train with and pictures that are held out: always the same ones, drawn with a seed."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SPLIT_SEED))
    kept, out = order[held_out:], order[:held_out]
    return TensorDataset(*(one[kept] for one in train.tensors)), TensorDataset(*(one[out] for one in train.tensors))


def wanted(
    found: Found[Trial, Row], plan: Plan = FULL_PLAN, data_sets: Collection[str] = tuple(DATA_SETS)
) -> Iterator[Trial]:
    """All trials, as far as what is found tells, those first that say most."""
    for stage in plan.stages:
        if stage.data not in data_sets:
            continue
        chosen = []
        for delay in stage.delays:
            for net in reversed(NETS):  # the longer first
                trials, best = tuning_of(stage.data, net, delay, stage.repair, found, plan)
                yield from trials
                chosen += [best] if best is not None else []
        for seed in plan.seeds:  # one seed of everything, then the next
            yield from (replace(best, seed=seed) for best in chosen)


def tuning_of(
    data: str, net: str, delay: int, repair: str, found: Found[Trial, Row], plan: Plan = FULL_PLAN
) -> tuple[list[Trial], Trial | None]:
    """The trials that choose the rate of a method, and the best of them once all are there."""

    def score(trial: Trial) -> float | None:
        return final_accuracy(found[trial], trial.guessing) if trial in found else None

    least = _LEAST_RATE[net] / _LOWER_BY[delay]
    clip = CLIP_NORMS[0] if repair == "clip" else 0.0
    base = Trial(data=data, net=net, delay=delay, repair=repair, lr=least, momentum=MOMENTUM, clip=clip)
    first = [least * 2**step for step in range(plan.rates)]
    trials, best = tuned(first, lambda rate: replace(base, lr=rate), score, plan.most_tried)
    if repair != "clip" or best is None:
        return trials, best
    norms = [best, *(replace(best, clip=norm) for norm in CLIP_NORMS[1:])]
    scores = [score(trial) for trial in norms]
    known = [one for one in scores if one is not None]
    chosen = norms[known.index(max(known))] if len(known) == len(norms) else None
    return [*trials, *norms[1:]], chosen


# ---------------------------------------------------------------- what it takes


def least_trials(stage: Stage, plan: Plan = FULL_PLAN) -> int:
    """Of one net: more are tried where the best rate is at the edge of those tried first."""
    of_a_delay = plan.rates + (len(CLIP_NORMS) - 1) * (stage.repair == "clip") + len(plan.seeds)
    return len(stage.delays) * of_a_delay


def gradients(data: str, net: str, workers: int) -> int:
    """Of one training."""
    return workers * length_of(data, net).updates(tuning=False)
