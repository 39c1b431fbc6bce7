"""What is trained: the paper's six configurations with rates to try, and trainings that ask one question each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from experiments.common.curves import Point
from experiments.common.trials import Found
from experiments.common.tuning import tuned

LATENCY = "chen2016"
TUNING_SEED = 0
SEEDS = (1, 2, 3)
#: Workers that an update takes, and backups beside them; async: all workers by themselves.
SYNC = ((50, 3), (100, 6), (200, 12))
ASYNC = (53, 106, 212)
#: Rates to begin with, in factors of 2. With RMSProp's epsilon of 1 a step is about that of SGD with momentum 0.9.
_FIRST_RATES = {
    ("sync", 50): (0.1, 0.2, 0.4, 0.8, 1.6),
    ("sync", 100): (0.1, 0.2, 0.4, 0.8, 1.6),
    ("sync", 200): (0.1, 0.2, 0.4, 0.8, 1.6),
    ("async", 53): (0.0016, 0.0032, 0.0064, 0.0128, 0.0256),
    ("async", 106): (0.0008, 0.0016, 0.0032, 0.0064, 0.0128),
    ("async", 212): (0.0004, 0.0008, 0.0016, 0.0032, 0.0064),
}
#: Async rates that are trained in full with every seed. The short tuning ranks these within a few points.
FULL_RATES = {106: (0.0008, 0.0016, 0.0032, 0.0064), 212: (0.0008, 0.0016, 0.0032, 0.0064)}
#: The initial rates of the second table, in units of the tuned one.
_TABLE_OF_RATES = (0.25, 0.5, 1.0, 2.0)
#: The initial rates whose first epochs are measured closely, in the same units.
_EARLY_RATES = (0.125, 0.25, 0.5, 1.0)
EARLY_QUORUMS = (100, 50)
#: Global norm that async gradients are clipped to (the paper clips async and no other), and two other norms to try.
CLIP_NORM = 2.0
OTHER_CLIP_NORMS = (1.0, 4.0)
#: Workers whose async training is clipped to the other norms.
CLIPPED_WORKERS = 212
#: The average of the parameters looks back so many epochs; the paper's 0.9999 is a third of one to two.
AVERAGE_EPOCHS = 0.5
#: The rate of the grid for every quorum: tuning chose it for 50, 100 and 200 workers.
GRID_RATE = 0.4
#: Backups of every quorum of the grid, beside none.
GRID_BACKUPS = 6


@dataclass(frozen=True)
class Trial:
    """One training.

    quorum: arrivals that make an update (1 for async). backups: workers beside the quorum.
    epochs: length of the schedule of the learning rate. stop: epochs until the training stops (0: all).
    clip: global norm that gradients are clipped to (0: not clipped).
    average: epochs that the average of the measured parameters looks back (0: no average).
    """

    method: str
    quorum: int
    backups: int
    lr: float
    seed: int
    epochs: int
    clip: float = 0.0
    average: float = AVERAGE_EPOCHS
    stop: int = 0

    @property
    def workers(self) -> int:
        return self.quorum + self.backups

    @property
    def is_tuning(self) -> bool:
        return self.seed == TUNING_SEED

    @property
    def is_usual(self) -> bool:
        """Whether the trial is as its configuration is, but for rate, seed and length."""
        clip = CLIP_NORM if self.method == "async" else 0.0
        return (self.clip, self.average, self.stop) == (clip, AVERAGE_EPOCHS, 0)

    @property
    def name(self) -> str:
        return f"async {self.workers}" if self.method == "async" else f"sync {self.quorum}+{self.backups}"


@dataclass(frozen=True)
class Length:
    """How long and how large trainings are."""

    epochs: int
    tuning_epochs: int
    batch_size: int
    train_samples: int
    held_back: int  # of them, for the tuning, which never sees the test
    seeds: tuple[int, ...] = SEEDS
    width: float = 1.0
    first_rates: int = 5
    most_rates: int = 7
    most_workers: int = 1000
    long_epochs: int = 40
    long_seeds: tuple[int, ...] = (1, 2)
    early_epochs: int = 4
    early_seeds: tuple[int, ...] = (1, 2)
    grid: tuple[int, ...] = (50, 70, 80, 90, 100)  # quorums
    grid_backups: tuple[int, ...] = (0, 3, 6, 12)  # trained with the largest quorum; the others have two of them
    other_clip_norms: tuple[float, ...] = OTHER_CLIP_NORMS
    timed_rounds: int = 1000  # of each split of the grid, without gradients
    timed_seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


FULL = Length(epochs=20, tuning_epochs=5, batch_size=16, train_samples=50_000, held_back=5_000)
QUICK = Length(
    1,
    1,
    batch_size=2,
    train_samples=138,
    held_back=32,
    seeds=(1,),
    width=0.1,
    first_rates=2,
    most_rates=2,
    most_workers=53,
    long_epochs=2,
    long_seeds=(1,),
    early_epochs=1,
    early_seeds=(1,),
    grid=(3, 6),
    grid_backups=(0, 1),
    timed_rounds=3,
    timed_seeds=(1,),
)


def configurations() -> list[Trial]:
    """The six, without a rate and a seed yet; async first, since it takes longest."""
    made = [Trial("async", 1, workers - 1, 0.0, TUNING_SEED, 0, CLIP_NORM) for workers in reversed(ASYNC)]
    return made + [Trial("sync", quorum, backups, 0.0, TUNING_SEED, 0) for quorum, backups in SYNC]


def final_accuracy(points: list[Point]) -> float:
    """Of the last version; a training that diverged can only guess."""
    return 0.1 if points[-1].diverged else points[-1].measure


def tuning_of(one: Trial, found: Found[Trial, Point], length: Length) -> tuple[list[Trial], Trial | None]:
    """The trials that choose a configuration's rate, and the best of them once all are there."""

    def score(trial: Trial) -> float | None:
        return final_accuracy(found[trial]) if trial in found else None

    size = one.quorum if one.method == "sync" else one.workers
    return tuned(
        _FIRST_RATES[one.method, size][: length.first_rates],
        lambda rate: replace(one, lr=rate, seed=TUNING_SEED, epochs=length.tuning_epochs),
        score,
        length.most_rates,
    )


def in_full(one: Trial, found: Found[Trial, Point], length: Length) -> tuple[list[Trial], Trial | None]:
    """An async configuration's rates in full length, seed 0 standing for every seed, and the best once all are there.

    The best is that with the highest mean test accuracy, in favour of async.
    """

    def mean(trial: Trial) -> float | None:
        seeds = [found.get(replace(trial, seed=seed)) for seed in length.seeds]
        return None if None in seeds else fmean(final_accuracy(points) for points in seeds if points)

    if one.workers not in FULL_RATES:
        best = tuning_of(one, found, length)[1]
        return [], None if best is None else replace(best, epochs=length.epochs)
    rates = FULL_RATES[one.workers]
    return tuned(rates, lambda rate: replace(one, lr=rate, epochs=length.epochs), mean, len(rates) + 1)


def grid(length: Length) -> list[Trial]:
    """Quorums and backups at one rate, seed 0 standing for every seed: first quorums, then backups of the largest."""
    largest, few = max(length.grid), min(length.grid_backups)
    split = [(quorum, few) for quorum in length.grid]
    split += [(largest, backups) for backups in length.grid_backups]
    split += [(quorum, GRID_BACKUPS) for quorum in length.grid if GRID_BACKUPS in length.grid_backups]
    return [
        Trial("sync", quorum, backups, GRID_RATE, TUNING_SEED, length.epochs)
        for quorum, backups in dict.fromkeys(split)
    ]


def early(best: Trial, length: Length) -> list[Trial]:
    """The first epochs at small and tuned rates, with the average of the parameters and without it."""
    return [
        replace(best, lr=best.lr * factor, seed=seed, stop=length.early_epochs, average=average)
        for seed in length.early_seeds
        for factor in _EARLY_RATES
        for average in (AVERAGE_EPOCHS, 0.0)
    ]


def wanted(found: Found[Trial, Point], length: Length) -> Iterable[Trial]:
    """All trials, as far as they are known, in the order of what they are worth: each part answers one question."""
    chosen: list[Trial] = []
    for one in configurations():
        if one.workers > length.most_workers:
            continue
        trials, best = tuning_of(one, found, length)
        yield from trials
        if best is not None:
            chosen.append(replace(best, epochs=length.epochs))
    sync, others = ([one for one in chosen if (one.method == "sync") is wanted_here] for wanted_here in (True, False))
    for seed in length.seeds:  # what takes least comes first: a stop loses the trials that are under way
        yield from (replace(best, seed=seed) for best in sync)
        for best in sync:
            if best.quorum == 100:
                yield from (replace(best, seed=seed, lr=best.lr * factor) for factor in _TABLE_OF_RATES)
    for seed in length.seeds:
        yield from (replace(best, seed=seed) for best in others)
    for best in sync:
        if best.quorum in EARLY_QUORUMS:
            yield from early(best, length)
    full = {one.workers: in_full(one, found, length) for one in others}
    edges: list[Trial] = []
    for workers, (rates, _) in full.items():
        trials = [replace(one, seed=seed) for one in rates for seed in length.seeds]
        yield from (one for one in trials if one.lr in FULL_RATES[workers])
        edges += (one for one in trials if one.lr not in FULL_RATES[workers])
    for one in grid(length) if sync else ():
        yield from (replace(one, seed=seed) for seed in length.seeds)
    for best in chosen:
        if best.workers == min(ASYNC):
            yield from (replace(best, seed=seed, epochs=length.long_epochs) for seed in length.long_seeds)
    best_clipped = full.get(CLIPPED_WORKERS, ([], None))[1]
    if best_clipped is not None:
        for clip in length.other_clip_norms:
            yield from (replace(best_clipped, seed=seed, clip=clip) for seed in length.seeds)
    yield from edges
