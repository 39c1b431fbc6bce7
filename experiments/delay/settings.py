"""What is trained: nets, delays and repairs, each with its learning rates to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.common.trials import Found
from experiments.common.tuning import tuned
from experiments.delay.rows import Row, Setting, final_accuracy

NETS = ("alexnet", "googlenet")
DELAYS = (0, 1, 2, 4)
SEEDS = (1, 2, 3)
WORKERS = 4
MOMENTUM = 0.9

#: What is done about a delay. "none" has the learning rate that is best without a delay; all others one of their own.
REPAIRS = ("none", "lr", "warm-up", "momentum", "compensation")
REPAIRED_DELAY = 4
WARM_UP_SHARE = 0.25
LOWER_MOMENTUM = 0.5
#: Learning rates are tried from here in factors of 2. A quadratic bowl with momentum 0.9 stays stable up to a rate that
#: is 5, 17 and 42 times lower at delays of 1, 2 and 4 (stability.py); the grids go down somewhat less.
_LEAST_RATE = {"alexnet": 0.02, "googlenet": 0.1}
_LOWER_BY = {0: 1, 1: 4, 2: 8, 4: 16}
_RATES = 4
MOST_TRIED = 6
_COMPENSATIONS = (64.0, 1024.0)
#: Delays and repairs whose rate is tuned, those first that take longest.
METHODS = (
    *((REPAIRED_DELAY, repair) for repair in ("compensation", "warm-up", "momentum")),
    *((delay, "lr") for delay in DELAYS),
)
QUICK_METHODS = ((4, "compensation"), (4, "warm-up"), (0, "lr"), (4, "lr"))


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long and how large trainings are."""

    epochs: int
    tuning_epochs: int
    batch_size: int
    train_samples: int = 50_000
    test_samples: int = 10_000

    def updates(self, tuning: bool) -> int:
        """Rounds of WORKERS batches; the last one of an epoch takes what is left."""
        per_epoch = -(-self.train_samples // (self.batch_size * WORKERS))
        return per_epoch * (self.tuning_epochs if tuning else self.epochs)


FULL = {
    "alexnet": Length(epochs=16, tuning_epochs=5, batch_size=64),
    "googlenet": Length(epochs=12, tuning_epochs=4, batch_size=128),
}
QUICK = Length(epochs=2, tuning_epochs=1, batch_size=4, train_samples=32, test_samples=32)


def wanted(
    found: Found[Setting, Row],
    methods: Sequence[tuple[int, str]] = METHODS,
    seeds: Sequence[int] = SEEDS,
    most_tried: int = MOST_TRIED,
) -> list[Setting]:
    """All trainings, as far as what is found tells: each method's tuning, then what was chosen with every seed.

    The rate that is best without a delay is also what those have who repair nothing: they come last.
    """
    ends = {setting: final_accuracy(rows) for setting, rows in found.items()}
    first: list[Setting] = []
    last: list[Setting] = []
    for delay, repair in methods:
        for net in reversed(NETS):  # the larger first
            tuning, best = _tuned(net, delay, repair, ends, most_tried)
            first += tuning
            if best is None:
                continue
            chosen = [replace(best, seed=seed) for seed in seeds]
            if delay:
                first += chosen
            else:
                last += [replace(one, repair="none", delay=other) for other in DELAYS for one in chosen]
    return [*first, *last]


def _tuned(
    net: str, delay: int, repair: str, ends: Mapping[Setting, float], most: int
) -> tuple[list[Setting], Setting | None]:
    """The trainings that choose the rate of a method, as many to begin with for each, and the one that is chosen."""
    least = _LEAST_RATE[net] / _LOWER_BY[delay]
    rates = [least * 2**step for step in range(_RATES)]
    base = Setting(net=net, delay=delay, repair=repair, lr=least, momentum=MOMENTUM)
    if repair == "compensation":
        tried = [replace(base, lr=rate, compensation=value) for rate in rates[:2] for value in _COMPENSATIONS]
        return tried, max(tried, key=ends.__getitem__) if all(one in ends for one in tried) else None
    if repair == "momentum":  # the same rates in the long run: rate / (1 − momentum)
        factor = (1 - LOWER_MOMENTUM) / (1 - MOMENTUM)
        base, rates = replace(base, momentum=LOWER_MOMENTUM), [rate * factor for rate in rates]
    return tuned(rates, lambda rate: replace(base, lr=rate), ends.get, most)
