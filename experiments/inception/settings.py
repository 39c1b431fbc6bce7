"""What is trained: the paper's six configurations, each with rates to try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from experiments.common.curves import Point
from experiments.common.trials import Found
from experiments.common.tuning import tuned

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
#: The initial rates of the second table, in units of the tuned one.
_TABLE_OF_RATES = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Trial:
    """One training. quorum: arrivals that make an update (1 for async); backups: workers beside them."""

    method: str
    quorum: int
    backups: int
    lr: float
    seed: int
    epochs: int

    @property
    def workers(self) -> int:
        return self.quorum + self.backups

    @property
    def is_tuning(self) -> bool:
        return self.seed == TUNING_SEED

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
)


def configurations() -> list[Trial]:
    """The six, without a rate and a seed yet; async first, since it takes longest."""
    made = [Trial("async", 1, workers - 1, 0.0, TUNING_SEED, 0) for workers in reversed(ASYNC)]
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


def wanted(found: Found[Trial, Point], length: Length) -> Iterable[Trial]:
    """All trials, as far as they are known: tuning, then the chosen rates with every seed, and the table of rates."""
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
