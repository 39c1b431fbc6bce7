"""What is trained: ten stalenesses, what is done about each, and the rates and norms to choose from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from experiments.common.curves import Point
from experiments.common.trials import Found
from experiments.common.tuning import tuned

STALENESSES = (0, 5, 10, 15, 20, 25, 50, 75, 100, 125)
#: Where repairs are tried one by one.
REPAIRED = (20, 50, 100)
SEEDS = (1, 2, 3)
TUNING_SEED = 0

#: What is done about staleness. All but "rate" and "ramp and rate" have the paper's learning rate.
METHODS = ("none", "ramp", "clip", "rate", "ramp and rate")
#: Those with a number of their own, a norm or a learning rate, and those that are tried at every staleness.
TUNED = ("clip", "rate", "ramp and rate")
EVERYWHERE = ("none", "ramp and rate")
PAPERS_LR = 0.1
#: The staleness grows over the first 3 of 25 epochs.
RAMP_SHARE = 3 / 25
#: Every method that has a number of its own chooses it from as many short trainings.
FIRST_RATES = (0.025, 0.05, 0.1)
FIRST_NORMS = (0.25, 0.5, 1.0)
MOST_TRIED = 6
#: The average of the parameters looks back over this share of the updates. The paper's decay of 0.9999 looks back
#: 10,000 of them, which here is nearly the whole training.
AVERAGED_SHARE = 0.05
PAPERS_EMA = 0.9999
GUESSING = 0.9  # the error of whoever knows nothing of ten digits


@dataclass(frozen=True)
class Trial:
    """One training. ramp: the staleness grows to what it is; clip: the norm to clip to, 0 for none."""

    staleness: int
    ramp: bool
    lr: float
    clip: float
    ema: float
    seed: int
    epochs: int

    @property
    def is_tuning(self) -> bool:
        return self.seed == TUNING_SEED


@dataclass(frozen=True)
class Length:
    """How long and how large trainings are. held_out: pictures that the tuning is measured with."""

    epochs: int
    tuning_epochs: int
    batch_size: int
    samples: int
    held_out: int
    stalenesses: tuple[int, ...] = STALENESSES
    repaired: tuple[int, ...] = REPAIRED
    seeds: tuple[int, ...] = SEEDS
    channels: tuple[int, ...] | None = None

    def updates(self, epochs: int, held_out: int) -> int:
        """One batch each; the last of an epoch is what is left."""
        return epochs * math.ceil((self.samples - held_out) / self.batch_size)

    def stalenesses_of(self, method: str) -> tuple[int, ...]:
        """Where a method is tried."""
        return self.stalenesses if method in EVERYWHERE else self.repaired

    def trial(self, staleness: int, method: str, number: float | None = None, seed: int = TUNING_SEED) -> Trial:
        """A training of a method; `number` is its rate or norm, for those that have one of their own."""
        is_tuning = seed == TUNING_SEED
        epochs = self.tuning_epochs if is_tuning else self.epochs
        updates = self.updates(epochs, self.held_out if is_tuning else 0)
        return Trial(
            staleness,
            "ramp" in method and staleness > 0,
            number if "rate" in method and number is not None else PAPERS_LR,
            number if method == "clip" and number is not None else 0.0,
            round(1 - 1 / max(1.0, AVERAGED_SHARE * updates), 6),
            seed,
            epochs,
        )


FULL = Length(epochs=25, tuning_epochs=5, batch_size=128, samples=60_000, held_out=10_000)
QUICK = Length(
    epochs=2,
    tuning_epochs=1,
    batch_size=16,
    samples=160,
    held_out=32,
    stalenesses=(0, 2, 8),
    repaired=(8,),
    seeds=(1, 2),
    channels=(4, 4, 4, 8),
)


def final_error(points: list[Point]) -> float:
    """Of the last version; a training that diverged can only guess."""
    return GUESSING if points[-1].diverged or math.isnan(points[-1].measure) else points[-1].measure


def tuning_of(
    staleness: int, method: str, found: Found[Trial, Point], length: Length
) -> tuple[list[Trial], Trial | None]:
    """The short trainings that choose a method's number, and the best of them once all are there.

    By the loss on pictures that are held out, which says more than an error of a few dozen pictures.
    """

    def score(trial: Trial) -> float | None:
        if trial not in found:
            return None
        last = found[trial][-1]
        return -math.inf if last.diverged or math.isnan(last.loss) else -last.loss

    def make(number: float) -> Trial:
        return length.trial(staleness, method, number)

    return tuned(FIRST_NORMS if method == "clip" else FIRST_RATES, make, score, MOST_TRIED)


def trainings_of(staleness: int, method: str, found: Found[Trial, Point], length: Length) -> list[Trial] | None:
    """A method's trainings with every seed; None while its number is not chosen."""
    number = None
    if method in TUNED:
        best = tuning_of(staleness, method, found, length)[1]
        if best is None:
            return None
        number = best.clip if method == "clip" else best.lr
    return [length.trial(staleness, method, number, seed) for seed in length.seeds]


def with_papers_average(trials: list[Trial]) -> list[Trial]:
    """The same with the decay that the paper has."""
    return [replace(trial, ema=PAPERS_EMA) for trial in trials]


def wanted(found: Found[Trial, Point], length: Length) -> Iterator[Trial]:
    """All trials, as far as they are known, those first that say most."""
    for method in ("ramp and rate", "none", "ramp", "rate", "clip"):
        yield from _of_method(method, found, length)
    yield from with_papers_average(trainings_of(0, "none", found, length) or [])


def _of_method(method: str, found: Found[Trial, Point], length: Length) -> Iterator[Trial]:
    chosen = []
    for staleness in length.stalenesses_of(method):
        if method in TUNED:
            yield from tuning_of(staleness, method, found, length)[0]
        chosen.append(trainings_of(staleness, method, found, length) or [])
    for place in range(len(length.seeds)):  # one seed of everything, then the next
        yield from (trials[place] for trials in chosen if trials)
